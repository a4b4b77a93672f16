"""Comparing stored tensors with those of the model at hand, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mlflashpoint.errors import StateMismatchError

_SHOWN = 3


def compare(
    stored: Mapping[str, Any], present: Mapping[str, Any], *, missing: bool = True, dtypes: bool = False
) -> None:
    """Check that two sets of named tensors fit each other.

    Args:
        stored: tensors by name, from the store; values that are no tensors count as names alone.
        present: tensors by name, of the model.
        missing: whether a name on one side only is a mismatch.
        dtypes: whether another dtype is one.

    Raises:
        StateMismatchError: names the first differences, and how many there are.
    """
    found = []
    for name in [*present, *(name for name in stored if name not in present)]:
        if name not in stored or name not in present:
            if missing:
                side = "the store" if name in stored else "the model"
                found.append(f"{name} is only in {side}")
            continue
        one, other = stored[name], present[name]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape or (dtypes and one.dtype != other.dtype):
            found.append(f"{name} is {_kind(one)} in the store, {_kind(other)} in the model")
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise StateMismatchError(
            f"the model has changed: {'; '.join(found[:_SHOWN])}{more}",
            remedy="restart with the model that was saved, or give the changed job another MLFLASHPOINT_JOB_ID",
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
