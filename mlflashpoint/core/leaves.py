"""The allow-list: types beyond plain data that a state may hold, each with the functions that take it apart.

A file names an entry of this list, never a class or a module; what is not registered in the reading process is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlflashpoint.errors import StateTypeError


@dataclass(frozen=True)
class Leaf:
    """An entry of the allow-list.

    Attributes:
        name: stands in the file.
        cls: exactly this type is taken apart, its subclasses are not.
        encode: object -> state of plain data, containers, tensors and other registered types.
        decode: that state -> object.
    """

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_name: dict[str, Leaf] = {}
_by_type: dict[type, Leaf] = {}


def register_leaf(name: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Allow objects of exactly the type ``cls`` in a state.

    Args:
        name: stable over releases, for example ``megatron.RerunState``; a class registered again under its own name
            replaces the earlier entry.
        cls: the type.
        encode: object -> nested state. Called while the training thread waits; it may return the object's own
            tensors, they are copied before the save returns.
        decode: nested state -> object. Must not trust the state: raise on what ``encode`` never gives.

    Raises:
        StateTypeError: ``name`` is taken by another class, or ``cls`` by another name.
    """
    known = _by_name.get(name)
    if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise StateTypeError(f"leaf {name!r} is registered for {known.cls.__qualname__}", remedy="use another name")
    other = _by_type.get(cls)
    if other is not None and other.name != name:
        raise StateTypeError(f"{cls.__qualname__} is registered as leaf {other.name!r}", remedy="use that name")
    _by_name[name] = _by_type[cls] = Leaf(name, cls, encode, decode)


def leaf_of(cls: type) -> Leaf | None:
    """The entry for exactly this type."""
    found = _by_type.get(cls)
    if found is None and cls.__module__.partition(".")[0] == "numpy":
        _add_numpy()
        found = _by_type.get(cls)
    return found


def leaf_named(name: str) -> Leaf | None:
    """The entry of that name."""
    found = _by_name.get(name)
    if found is None and name.startswith("numpy."):
        _add_numpy()
        found = _by_name.get(name)
    return found


def _add_numpy() -> None:
    # numpy is no dependency of ours: whoever holds one of its objects has imported it.
    with contextlib.suppress(ImportError):
        from mlflashpoint.core import numpy_leaves

        numpy_leaves.register()
