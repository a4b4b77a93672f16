"""Copying many tensors at once, on the host with two threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlflashpoint.core.copying import Span, copy_tensors, spans_of


def plan_copies(tensors: Sequence[Tensor]) -> tuple[list[Span], int]:
    """How to share the copying of such tensors out, and their bytes; stays good while shapes and dtypes do."""
    sizes = [(tensor.numel(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    return spans_of(sizes), sum(nbytes for _, nbytes in sizes)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor], plan: tuple[list[Span], int] | None = None) -> None:
    """Copy each source into the target of the same shape, on any devices and between any dtypes.

    Args:
        targets: written.
        sources: read.
        plan: from ``plan_copies``, if all are on the host and of equal dtypes.
    """
    if not targets:
        return
    if plan is None and all(
        target.device.type == source.device.type == "cpu" and target.dtype == source.dtype
        for target, source in zip(targets, sources, strict=True)
    ):
        plan = plan_copies(sources)
    if plan is not None:
        copy_tensors(targets, sources, *plan)
        return
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
