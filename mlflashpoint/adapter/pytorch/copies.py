"""Copying many tensors at once, on the host with two threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlflashpoint.core.copying import in_two_threads

#: bytes that a thread takes at a time
_BLOCK = 8 << 20


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same shape, on any devices and between any dtypes.

    Args:
        targets: written.
        sources: read.
    """
    if all(target.is_cpu and source.is_cpu for target, source in zip(targets, sources, strict=True)):
        units, nbytes = _units(targets, sources)
        in_two_threads(units, nbytes)
        return
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def is_plain(target: Tensor, source: Tensor) -> bool:
    """Whether the elements can be taken as they are: of one dtype, and no lazily conjugated or negated view."""
    return target.dtype is source.dtype and not (
        target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg()
    )


def _units(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[list[Callable[[], object]], int]:
    """Portions for one thread's turn, and the bytes of all together."""
    units: list[Callable[[], object]] = []
    to: list[Tensor] = []
    of: list[Tensor] = []
    waiting = total = 0
    for target, source in zip(targets, sources, strict=True):
        nbytes = source.numel() * source.element_size()
        total += nbytes
        if not is_plain(target, source):
            units.append(functools.partial(target.copy_, source))
            continue
        if nbytes > 2 * _BLOCK and target.is_contiguous() and source.is_contiguous():
            units += _blocks(target, source)
            continue
        to.append(target)
        of.append(source)
        waiting += nbytes
        if waiting >= _BLOCK:
            units.append(functools.partial(torch._foreach_copy_, to, of))
            to, of, waiting = [], [], 0
    if to:
        units.append(functools.partial(torch._foreach_copy_, to, of))
    return units, total


def _blocks(target: Tensor, source: Tensor) -> list[Callable[[], object]]:
    step = _BLOCK // source.element_size()
    to, of = target.detach().view(-1), source.detach().view(-1)
    return [
        functools.partial(to[start : start + step].copy_, of[start : start + step])
        for start in range(0, of.numel(), step)
    ]
