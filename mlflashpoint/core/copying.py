"""Copies many tensors between host memory with two threads: the calling one and a helper.

One thread does not saturate the memory of any machine that trains, and the helper costs nothing between saves. Large
tensors are moved in blocks as raw memory, small ones in batches of one call each.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlflashpoint.core.shard import is_dense
from mlflashpoint.errors import DeadlineExceededError

#: tensors from this many bytes on are moved as raw memory
LARGE = 256 << 10
#: bytes that a thread takes at a time
BLOCK = 8 << 20
#: below this many bytes waking a helper costs more than it saves
_WORTH_A_THREAD = 2 << 20
_DEADLINE_S = 600.0

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None

Unit = Callable[[], object]
#: positions of the tensors that are copied together, first and behind the last; a large one stands alone
Span = tuple[int, int]


def spans_of(sizes: Sequence[int]) -> list[Span]:
    """Cut tensors of these many bytes into portions for one thread's turn."""
    spans: list[Span] = []
    first, waiting = 0, 0
    for place, nbytes in enumerate(sizes):
        if nbytes >= LARGE:
            if first < place:
                spans.append((first, place))
            spans.append((place, place + 1))
            first, waiting = place + 1, 0
            continue
        waiting += nbytes
        if waiting >= BLOCK:
            spans.append((first, place + 1))
            first, waiting = place + 1, 0
    if first < len(sizes):
        spans.append((first, len(sizes)))
    return spans


def copy_tensors(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    sizes: Sequence[int],
    spans: Sequence[Span] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Copy each source into the target of the same dtype and shape; all on the CPU.

    Args:
        targets: written.
        sources: read.
        sizes: bytes of each.
        spans: ``spans_of(sizes)``, if it is known.
        meanwhile: what this thread does before it joins in the copying.
    """
    units: list[Unit] = []
    for first, end in spans_of(sizes) if spans is None else spans:
        if end - first == 1 and sizes[first] >= LARGE:
            units += _large(targets[first], sources[first], sizes[first])
        else:
            units.append(functools.partial(torch._foreach_copy_, list(targets[first:end]), list(sources[first:end])))
    in_two_threads(units, sum(sizes), meanwhile)


def _large(target: Tensor, source: Tensor, nbytes: int) -> list[Unit]:
    dense = target.is_contiguous() or is_dense(target.shape, target.stride())
    if not dense or target.stride() != source.stride() or source.is_conj() != target.is_conj():
        return [functools.partial(target.copy_, source)]
    if source.is_neg() != target.is_neg():
        return [functools.partial(target.copy_, source)]
    to, start = target.data_ptr(), source.data_ptr()
    return [
        functools.partial(_memmove, to + offset, start + offset, min(BLOCK, nbytes - offset))
        for offset in range(0, nbytes, BLOCK)
    ]


def in_two_threads(units: Sequence[Unit], nbytes: int, meanwhile: Callable[[], object] | None = None) -> None:
    """Run all units, each once, in the calling thread and a helper; raises what one of them raised.

    Args:
        units: independent of each other, each of some milliseconds without the interpreter's lock.
        nbytes: what they move together, to tell whether a helper is worth it.
        meanwhile: what this thread does first.
    """
    if nbytes < _WORTH_A_THREAD or len(units) < 2:
        if meanwhile is not None:
            meanwhile()
        with torch.no_grad():
            for unit in units:
                unit()
        return
    turn = itertools.count()

    def work() -> None:
        with torch.no_grad():
            while (number := next(turn)) < len(units):
                units[number]()

    helper = _helper().submit(work)
    try:
        if meanwhile is not None:
            meanwhile()
        work()
    finally:
        # Even if this thread failed: the helper must not write after we have returned.
        failure = _outcome(helper)
    if failure is not None:
        raise failure


def _outcome(helper: concurrent.futures.Future[Any]) -> BaseException | None:
    try:
        return helper.exception(timeout=_DEADLINE_S)
    except concurrent.futures.TimeoutError:
        return DeadlineExceededError(f"the copying thread did not end within {_DEADLINE_S:g} s")


_executors: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


def _helper() -> concurrent.futures.ThreadPoolExecutor:
    # A forked child has no thread of its parent's, so the pool goes by process.
    pid = os.getpid()
    if pid not in _executors:
        _executors.clear()
        _executors[pid] = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mlflashpoint-copy")
    return _executors[pid]
