"""The import hook: sees a watched package come in, and calls back when a target module has run.

It walks ``sys.meta_path`` itself. ``importlib.util.find_spec(fullname)`` would take the parent package's import
lock, and a package whose ``__init__`` waits for a thread that imports a hooked submodule would hang.

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
        packages: top-level package -> names of the tables to load when a module of it is imported first.
        load: called with those names, once each; it calls ``watch`` for every target module.
        loaded: called as ``loaded(name, module, before)`` when a watched module has run; ``before`` are the names
            of the modules that were there before it ran, None if it had run before this finder saw it.
    """

    def __init__(
        self,
        packages: dict[str, list[str]],
        load: Callable[[Iterable[str]], None],
        loaded: Callable[[str, ModuleType, frozenset[str] | None], None],
    ) -> None:
        self._packages = packages
        self._load = load
        self._loaded = loaded
        self._watched: set[str] = set()
        self._unfinished: set[str] = set()
        self._lock = _thread.RLock()
        self._busy = _thread._local()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = _thread.RLock()

    def watch(self, name: str) -> None:
        """Call back when module ``name`` has run; one that is still running calls back as soon as it is done."""
        self._watched.add(name)
        module = sys.modules.get(name)
        if module is None:
            return
        if is_initializing(module):
            self._unfinished.add(name)
        else:
            self._fire(name, module, None)

    def load_tables(self, package: str) -> None:
        """Load the tables that wait for ``package``; a second call does nothing."""
        with self._lock:
            tables = self._packages.pop(package, None)
            if tables:
                self._load(tables)

    def poll(self) -> None:
        """Call back for the modules that were half initialised when they were first seen, and are done now."""
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
            return self._find_spec(fullname, path, target)
        except Exception:
            # whatever it was, the import system meets it again when it asks the next finder
            return None

    def _find_spec(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package in self._packages:
            self.load_tables(package)
        if self._unfinished:
            self.poll()
        # another tool's finder may walk sys.meta_path as this one does, and come back here
        busy: set[str] = self._busy.__dict__.setdefault("names", set())
        if fullname not in self._watched or fullname in busy:
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
        before = frozenset(sys.modules)
        self._loader.exec_module(module)
        # a module may have put another object in its place while it ran
        self._finder._fire(name, sys.modules.get(name, module), before)


def is_initializing(module: ModuleType) -> bool:
    """Whether the body of ``module`` is still running (in this thread or another)."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
