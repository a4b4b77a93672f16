"""Whether tensors are, in all but their memory, what earlier ones were.

Torch has a check in C++ for just this, with which its compiler guards its graphs. It is internal to torch: where it is
missing, or does not know its own tensors again, facts are compared one by one, which takes four times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_nested = operator.attrgetter("is_nested")


class Likeness:
    """Type, dtype, device, shape, strides, ``requires_grad``, and conjugate and negative bits of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._check = _guard_of(tensors)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are surely alike, and no tensor is among them twice. False also where that can't be told."""
        # Of a nested one torch's guard wants to know the strides, and that ends the process.
        if self._check is None or any(map(_nested, tensors)):
            return False
        # The guard asks whether a gradient is wanted now, not whether the tensor requires one.
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._check(*tensors) is True
        except Exception:
            return False


def _guard_of(tensors: Sequence[Tensor]) -> Callable[..., Any] | None:
    if any(map(_nested, tensors)):
        return None
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.inference_mode(False), torch.enable_grad():
            check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            return check if check(*tensors) is True else None
    except Exception:
        # Internal to torch, so anything may have become of it.
        return None
