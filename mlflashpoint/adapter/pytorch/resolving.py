"""The data of a plan's items as tensors: what a planner resolves, checked, with errors that name the item."""

from __future__ import annotations

import io
import logging

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.adapter.pytorch.registered import not_serialisable, require_registered, serialises_by_default
from mlflashpoint.errors import FlashpointError, StateTypeError

log = logging.getLogger("mlflashpoint.adapter")


def resolve_items(plan: SavePlan, planner: SavePlanner) -> list[torch.Tensor]:
    """The data of each item of ``plan``, in its order.

    Raises:
        StateTypeError: an object can't be serialised, or a planner gave what can't be stored; names the item.
        Exception: what a planner of the user's own raised, with a note that names the item.
    """
    resolved = planner.resolve_all() if isinstance(planner, StructureSavePlanner) else None
    checked = resolved is None and serialises_by_default(planner)
    data: list[torch.Tensor] = []
    for number, item in enumerate(plan.items):
        try:
            if checked and item.type is WriteItemType.BYTE_IO:
                require_registered(item.index.fqn, planner.lookup_object(item.index))  # type: ignore[attr-defined]
            value = planner.resolve_data(item) if resolved is None else resolved[number]
        except FlashpointError:
            raise
        except Exception as error:
            if checked and item.type is WriteItemType.BYTE_IO:
                found = planner.lookup_object(item.index)  # type: ignore[attr-defined]
                raise not_serialisable(item.index.fqn, found, error) from error
            # It is the planner's own, and for whoever wrote that to understand.
            _note(error, f"raised by {type(planner).__qualname__} for {item.index.fqn!r}")
            raise
        if item.type is WriteItemType.BYTE_IO and isinstance(value, io.BytesIO):
            value = bytes_tensor(value.getbuffer())
        elif not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise StateTypeError(
                f"{item.index.fqn!r} is a {kind}, no tensor or BytesIO",
                remedy="let the planner's transform_object give one of them",
            )
        elif value.layout is not torch.strided:
            raise StateTypeError(
                f"{item.index.fqn!r} is a tensor of layout {value.layout}, whose parts DCP can't load into place",
                remedy="save its dense form, or what it consists of (indices and values)",
            )
        data.append(value)
    return data


def bytes_tensor(data: bytes | memoryview) -> torch.Tensor:
    """The bytes as a tensor."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)


def _note(error: Exception, text: str) -> None:
    """Add to the error what tracebacks show below it; before Python 3.11 they don't, so it is logged as well."""
    log.error("%s: %s: %s", text, type(error).__name__, error)
    notes = [*getattr(error, "__notes__", ()), text]
    error.__notes__ = notes
