"""Which objects of a state DCP may pickle into a version: plain data, tensors, and types that somebody has registered.

DCP's planners serialise whatever is no tensor with ``torch.save``, and read it with an unpickler that imports any class
it is told to. What goes into memory by our hands follows the core's rule instead: a type beyond plain data is refused
unless it is on the allow-list, ours or torch's.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mlflashpoint.adapter.pytorch.missing import Missing
from mlflashpoint.core.leaves import leaf_of
from mlflashpoint.core.nesting import too_deep
from mlflashpoint.core.plain import PLAIN_TYPES
from mlflashpoint.errors import StateTypeError

_LEAVES = frozenset({*PLAIN_TYPES, torch.Tensor, torch.nn.Parameter})


def serialises_by_default(planner: Any) -> bool:
    """Whether DCP's own ``torch.save`` serialises the objects of ``planner``, and no code of the user's."""
    kind = type(planner)
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(kind, name) is getattr(DefaultSavePlanner, name) for name in ("resolve_data", "transform_object")
    )


def require_registered(key: str, value: Any) -> None:
    """Check an object that is about to be pickled.

    Args:
        key: its place in the state.
        value: the object.

    Raises:
        StateTypeError: it is, or holds, an object of a type that is neither plain data nor registered with
            ``register_leaf`` or ``torch.serialization.add_safe_globals``; names key and type.
    """
    if type(value) in _LEAVES:
        return
    if isinstance(value, Missing):
        raise value.error(key)
    found = _strange(key, value)
    if found is None or _torch_trusts(value):
        return
    place, kind = found
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise StateTypeError(
        f"{place!r} is a {name}, neither plain data nor registered",
        remedy=f"leave it out, store plain data in its place, or register the type: torch.serialization."
        f"add_safe_globals([{kind.__qualname__}]) or mlflashpoint.core.state.register_leaf",
    )


def not_serialisable(key: str, value: Any, error: Exception) -> StateTypeError:
    """For an object at ``key`` that DCP's ``torch.save`` has failed on with ``error``."""
    if isinstance(error, RecursionError):
        return too_deep(value, root=key)
    return StateTypeError(
        f"{key!r}, a {type(value).__module__}.{type(value).__qualname__}, can't be serialised by the planner: "
        f"{type(error).__name__}: {error}",
        remedy="leave it out, or register how to pickle its type (copyreg.pickle)",
    )


def _strange(key: str, value: Any) -> tuple[str, type] | None:
    """Place and type of the first object in ``value`` that the core would not store, None if there is none."""
    pending, seen = [(key, value)], set()
    while pending:
        place, item = pending.pop()
        kind = type(item)
        if kind in _LEAVES or leaf_of(kind) is not None or id(item) in seen:
            continue
        if kind is dict or kind is OrderedDict:
            pending += [(f"{place} key", name) for name in item] + [
                (f"{place}.{name}", of) for name, of in item.items()
            ]
        elif kind in (list, tuple, set, frozenset) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            pending += [(f"{place}[{number}]", of) for number, of in enumerate(item)]
        else:
            return place, kind
        seen.add(id(item))
    return None


def _torch_trusts(value: Any) -> bool:
    """Whether torch reads ``value`` back without importing what nobody has allowed."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True
