"""The import hook: sees a watched package come in, and calls back when a target module has run.

``find_spec`` runs under Python's global import lock, so it looks and does nothing else: what is slow, imports or logs
happens when a module is executed, under that module's own lock. (A fork takes the logging lock and then the import
lock; whoever logs under the import lock meets it the other way round.) It walks ``sys.meta_path`` itself:
``importlib.util.find_spec(fullname)`` would take the parent package's lock, and a package whose ``__init__`` waits
for a thread that imports a hooked submodule would hang.

The start-up path loads this module, so it imports nothing but built-in modules.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class Finder:
    """A meta path finder that never finds anything of its own.

    Args:
        packages: top-level package -> names of the tables to load before a module of it runs first.
        load: called with those names, once each; it returns the names of the modules to watch.
        loaded: called as ``loaded(name, module, before)`` when a watched module has run; ``before`` are the names
            of the modules that were there before it ran, None if it had run before this finder saw it.
    """

    def __init__(
        self,
        packages: dict[str, list[str]],
        load: Callable[[Iterable[str]], Iterable[str]],
        loaded: Callable[[str, ModuleType, frozenset[str] | None], None],
    ) -> None:
        self._tables = packages
        self._load = load
        self._loaded = loaded
        #: packages whose tables are not loaded, or being loaded
        self._unloaded = set(packages)
        self._watched: set[str] = set()
        #: watched modules that were half initialised when their table was loaded
        self._unfinished: set[str] = set()
        self._lock = _thread.RLock()
        self._loader_thread: int | None = None
        self._busy = _thread._local()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = _thread.RLock()
        if self._loader_thread not in (None, _thread.get_ident()):
            # the thread that was importing our modules is not in this child, and their locks stay taken: stay out
            for known in (self._tables, self._unloaded, self._watched, self._unfinished):
                known.clear()

    def load_tables(self, package: str) -> None:
        """Load the tables that wait for ``package``; a second call does nothing."""
        watched: Iterable[str] = ()
        with self._lock:
            tables = self._tables.pop(package, None)
            if tables:
                self._loader_thread = _thread.get_ident()
                try:
                    watched = self._load(tables)
                finally:
                    self._loader_thread = None
            self._watched.update(watched)
            self._unloaded.discard(package)
        # without the lock: this can import a framework, whose import another thread may be waiting for the lock in
        for name in watched:
            module = sys.modules.get(name)
            if module is None:
                continue
            if is_initializing(module):
                self._unfinished.add(name)
            else:
                self._fire(name, module, None)

    def _finish(self) -> None:
        for name in tuple(self._unfinished):
            module = sys.modules.get(name)
            if module is not None and is_initializing(module):
                continue
            self._unfinished.discard(name)
            if module is not None:
                self._fire(name, module, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec with a loader that calls back, or None: then the import goes on without us."""
        try:
            wanted = fullname in self._watched or self._unfinished or fullname.partition(".")[0] in self._unloaded
            return self._find_spec(fullname, path, target) if wanted else None
        except Exception:
            # whatever it was, the import system meets it again when it asks the next finder
            return None

    def _find_spec(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        # another tool's finder may walk sys.meta_path as this one does, and come back here
        busy: set[str] = self._busy.__dict__.setdefault("names", set())
        if fullname in busy:
            return None
        busy.add(fullname)
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                if finder is self or find_spec is None:
                    continue
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is None:
                    continue
                # a namespace package has no loader, and nothing in it to patch
                if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, HookLoader):
                    spec.loader = HookLoader(spec.loader, self)  # type: ignore[assignment]
                return spec
            return None
        finally:
            busy.discard(fullname)

    def executing(self, name: str) -> frozenset[str]:
        """Called before module ``name`` runs; returns the names of the modules that are there."""
        try:
            self.load_tables(name.partition(".")[0])
            self._finish()
        except Exception as error:
            # the import of a framework does not depend on our tables
            self._unloaded.discard(name.partition(".")[0])
            if sys.stderr is not None:
                sys.stderr.write(f"mlflashpoint agent: nothing is patched: {type(error).__name__}: {error}\n")
        return frozenset(sys.modules)

    def executed(self, name: str, module: ModuleType, before: frozenset[str]) -> None:
        """Called after module ``name`` has run."""
        if name in self._watched:
            self._fire(name, module, before)

    def _fire(self, name: str, module: ModuleType, before: frozenset[str] | None) -> None:
        try:
            self._loaded(name, module, before)
        except Exception:
            # the registry reports its own faults; what gets here must not fail the user's import
            return


class HookLoader:
    """Stands in for a loader until the module has run, then gets out of the way.

    Everything but ``exec_module`` is the real loader's (``get_code`` for ``python -m``, resources, source). Before the
    module runs, the real loader is put back, so that the module never sees this one.
    """

    def __init__(self, loader: Any, finder: Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # copy and pickle ask before __init__ has run
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        if create is None:
            return None
        created: ModuleType | None = create(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        name = module.__name__ if spec is None else spec.name
        before = self._finder.executing(name)
        self._loader.exec_module(module)
        # a module may have put another object in its place while it ran
        self._finder.executed(name, sys.modules.get(name, module), before)


def is_initializing(module: ModuleType) -> bool:
    """Whether the body of ``module`` is still running (in this thread or another)."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
