"""Copies many tensors between host memory with two threads: the calling one and a helper.

One thread does not saturate the memory of any machine that trains, and the helper costs nothing between saves. Large
tensors are moved in blocks as raw memory, small ones in batches of one call each.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Copy each source into the target of the same dtype and shape; all on the CPU.

    Args:
        targets: written.
        sources: read.
        sizes: bytes of each.
    """
    with torch.no_grad():
        units = _units(targets, sources, sizes)
        in_two_threads(units, sum(sizes))


def _units(targets: Sequence[Tensor], sources: Sequence[Tensor], sizes: Sequence[int]) -> list[Unit]:
    units: list[Unit] = []
    first, waiting = 0, 0
    for place, nbytes in enumerate(sizes):
        if nbytes < LARGE:
            waiting += nbytes
            if waiting < BLOCK:
                continue
            units.append(_batch(targets[first : place + 1], sources[first : place + 1]))
        else:
            if first < place:
                units.append(_batch(targets[first:place], sources[first:place]))
            units += _large(targets[place], sources[place], nbytes)
        first, waiting = place + 1, 0
    if first < len(sizes):
        units.append(_batch(targets[first:], sources[first:]))
    return units


def _batch(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Unit:
    return lambda: torch._foreach_copy_(list(targets), list(sources))


def _large(target: Tensor, source: Tensor, nbytes: int) -> list[Unit]:
    alike = target.stride() == source.stride() and target.is_non_overlapping_and_dense()  # type: ignore[attr-defined]
    if not alike or source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
        return [lambda: target.copy_(source)]
    to, start = target.data_ptr(), source.data_ptr()
    return [
        lambda offset=offset: _memmove(to + offset, start + offset, min(BLOCK, nbytes - offset))  # type: ignore[misc]
        for offset in range(0, nbytes, BLOCK)
    ]


def in_two_threads(units: Sequence[Unit], nbytes: int) -> None:
    """Run all units, each once, in the calling thread and a helper; raises what one of them raised.

    Args:
        units: independent of each other, each of some milliseconds without the interpreter's lock.
        nbytes: what they move together, to tell whether a helper is worth it.
    """
    if nbytes < _WORTH_A_THREAD or len(units) < 2:
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
