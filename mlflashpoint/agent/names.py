"""Names in other modules that were bound to a target before it was patched (``from a import f``)."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any


def replace(
    original: Any, replacement: Any, modules: Iterable[str] | None, undo: list[Callable[[], None]]
) -> list[str]:
    """Rebind module-level names from ``original`` to ``replacement``; returns them as ``module.name``.

    Args:
        original: what the names are bound to.
        replacement: what they shall be bound to.
        modules: names of the modules to look through; None for all that are imported.
        undo: a function that binds each name back is appended here.
    """
    replaced = []
    for module_name in list(sys.modules) if modules is None else modules:
        if module_name == "mlflashpoint" or module_name.startswith("mlflashpoint."):
            continue
        module = sys.modules.get(module_name)
        if not isinstance(module, types.ModuleType):
            continue
        # not vars(): a lazy module would load itself
        namespace = object.__getattribute__(module, "__dict__")
        for name, value in list(namespace.items()):
            if value is original:
                namespace[name] = replacement
                undo.append(_back(namespace, name, original, replacement))
                replaced.append(f"{module_name}.{name}")
    return replaced


def _back(namespace: dict[str, Any], name: str, original: Any, replacement: Any) -> Callable[[], None]:
    def back() -> None:
        if namespace.get(name) is replacement:
            namespace[name] = original

    return back


def holders(original: Any, *known: dict[str, Any]) -> int:
    """How many tuples, lists, dicts, sets and partials still refer to ``original``, without the ``known`` ones."""
    kinds = (tuple, list, dict, set, frozenset, functools.partial)
    ignored = set(map(id, known))
    return sum(isinstance(holder, kinds) and id(holder) not in ignored for holder in gc.get_referrers(original))
