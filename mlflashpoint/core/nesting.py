"""Where a state nests deeper than whoever walks it can go: found without recursion, told by one named error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlflashpoint.errors import StateTypeError

#: parts of a place that are shown from its beginning, and characters of each
_SHOWN, _LONGEST = 4, 60
#: objects that are looked at; a state of more is told without a place
_MOST = 1_000_000

REMEDY = "store it flatter, or leave out what refers back to what it is in"


def too_deep(state: Any, *, root: str = "state") -> StateTypeError:
    """For a ``state`` on which a walk has met Python's recursion limit.

    Args:
        state: mappings, lists, tuples and sets; what else it holds is not looked into.
        root: what the place begins with.

    Returns:
        an error that names the first place at which the state contains itself, or else one of the deepest.
    """
    place, cyclic, depth = _worst(state)
    where = f"{root}{shortened(place)}"
    if cyclic:
        return StateTypeError(f"{where}: the state contains itself", remedy=REMEDY)
    return StateTypeError(f"{where}: the state is nested too deep, {depth} levels there", remedy=REMEDY)


def shortened(place: list[str]) -> str:
    """The parts of a place as text; of many only the first ones."""
    shown = "".join(part if len(part) <= _LONGEST else f"{part[:_LONGEST]}..." for part in place[:_SHOWN])
    return shown if len(place) <= _SHOWN else f"{shown}... ({len(place)} parts)"


def shown_key(key: Any) -> str:
    """A key as it stands in a place; also one that nests too deep to be written out."""
    try:
        return repr(key)
    except RecursionError:
        return f"a {type(key).__name__} that is nested too deep"


def _worst(state: Any) -> tuple[list[str], bool, int]:
    """Place of the first cycle, or of the deepest container; whether it is a cycle; and how deep it lies."""
    place: list[str] = []
    open_ids, seen = {id(state)}, {id(state)}
    stack = [(state, _children(state))]
    deepest: list[str] = []
    while stack:
        item, children = stack[-1]
        found = next(children, None)
        if found is None:
            if len(place) > len(deepest):
                # Where the walk turns back: copied at every step, a chain would take its square.
                deepest = list(place)
            stack.pop()
            open_ids.discard(id(item))
            if place:
                place.pop()
            continue
        part, child = found
        if id(child) in open_ids:
            return [*place, part], True, len(place) + 1
        if id(child) in seen or len(seen) >= _MOST or not isinstance(child, (Mapping, list, tuple, set, frozenset)):
            continue
        seen.add(id(child))
        open_ids.add(id(child))
        place.append(part)
        stack.append((child, _children(child)))
    return deepest, False, len(deepest)


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):
        return ((f".{key}" if type(key) is str else f"[{shown_key(key)}]", child) for key, child in list(item.items()))
    if isinstance(item, (list, tuple, set, frozenset)):
        return ((f"[{number}]", child) for number, child in enumerate(list(item)))
    return iter(())
