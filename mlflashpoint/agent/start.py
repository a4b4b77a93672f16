"""Switch the agent on in this process: one finder on ``sys.meta_path``, and nothing else until a framework comes in.

The start-up path loads this module, so it imports nothing that ``python -c pass`` has not loaded already.
"""

from __future__ import annotations

import sys

from mlflashpoint.agent.finder import Finder
from mlflashpoint.agent.frameworks import FRAMEWORKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

_finder: Finder | None = None
_starts = 0


def start(frameworks: Sequence[tuple[str, tuple[str, ...], str]] = FRAMEWORKS) -> bool:
    """Install the import hook; returns False when it is installed already.

    Packages that were imported before are patched at once, and shown as late.
    """
    global _finder, _starts
    if _finder is not None:
        return False
    _starts += 1
    packages: dict[str, list[str]] = {}
    for _, names, table in frameworks:
        for name in names:
            packages.setdefault(name, []).append(table)
    finder = Finder(packages, lambda tables: _load(tables, frameworks), _loaded)
    _finder = finder
    sys.meta_path.insert(0, finder)
    for name in list(packages):
        if name in sys.modules:
            finder.load_tables(name)
    return True


def stop() -> None:
    """Take the import hook out and undo every patch; the patched functions are the frameworks' own again."""
    global _finder
    finder, _finder = _finder, None
    if finder is None:
        return
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
    registry = sys.modules.get("mlflashpoint.agent.registry")
    if registry is not None:
        registry.REGISTRY.undo()


def is_started() -> bool:
    """Whether the import hook is installed in this process."""
    return _finder is not None and _finder in sys.meta_path


def has_started() -> bool:
    """Whether it was ever installed, even if the process has taken it out since."""
    return _starts > 0


def _load(tables: Iterable[str], frameworks: Sequence[tuple[str, tuple[str, ...], str]]) -> list[str]:
    from mlflashpoint.agent.registry import REGISTRY

    found = [REGISTRY.load(framework, table) for framework, _, table in frameworks if table in tables]
    return [module for modules in found for module in modules]


def _loaded(name: str, module: ModuleType, before: frozenset[str] | None) -> None:
    from mlflashpoint.agent.registry import REGISTRY

    REGISTRY.loaded(name, module, before)
