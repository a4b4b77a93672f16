"""Copies many tensors between host memory with two threads: the calling one and a helper.

One thread does not saturate the memory of any machine that trains, and the helper costs nothing between saves. Large
tensors are moved in blocks as raw memory, small ones in batches of one call each.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlflashpoint.core.shard import is_dense
from mlflashpoint.errors import DeadlineExceededError

#: tensors of this many elements on are moved as raw memory: torch would start threads of its own for them
LARGE = 32768
#: bytes that a thread takes at a time
BLOCK = 8 << 20
#: and of a tensor of twice this size or more: the C library writes past the caches in moves of such a size
HUGE_BLOCK = 128 << 20
#: below this many bytes waking a helper costs more than it saves
_WORTH_A_THREAD = 2 << 20
_DEADLINE_S = 600.0

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None

Unit = Callable[[], object]


class Span(NamedTuple):
    """Tensors that one thread copies in one turn.

    Attributes:
        pick: takes them, as a tuple, out of a list of all.
        raw: whether they are large, and moved as memory.
        start, length: bytes to move, if it is a part of a single very large one; else 0 and -1.
    """

    pick: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    raw: bool = False
    start: int = 0
    length: int = -1


def spans_of(tensors: Iterable[tuple[int, int]]) -> list[Span]:
    """Cut tensors of the given ``(elements, bytes)`` into portions for one thread's turn."""
    spans: list[Span] = []
    waiting: dict[bool, list[int]] = {True: [], False: []}
    filled = {True: 0, False: 0}
    for place, (elements, nbytes) in enumerate(tensors):
        if nbytes > 2 * BLOCK:
            block = HUGE_BLOCK if nbytes >= 2 * HUGE_BLOCK else BLOCK
            for start in range(0, nbytes, block):
                spans.append(Span(_picker([place]), True, start, min(block, nbytes - start)))
            continue
        raw = elements >= LARGE
        waiting[raw].append(place)
        filled[raw] += nbytes
        if filled[raw] >= BLOCK:
            spans.append(Span(_picker(waiting[raw]), raw))
            waiting[raw], filled[raw] = [], 0
    return spans + [Span(_picker(places), raw) for raw, places in waiting.items() if places]


def _picker(places: list[int]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    if len(places) == 1:
        place = places[0]
        return lambda tensors: (tensors[place],)
    return operator.itemgetter(*places)


def copy_tensors(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    spans: Sequence[Span],
    nbytes: int,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Copy each source into the target of the same dtype and shape; all on the CPU.

    Args:
        targets: written.
        sources: read.
        spans: ``spans_of`` them.
        nbytes: of all together.
        meanwhile: what this thread does before it joins in the copying.
    """
    units: list[Unit] = []
    for span in spans:
        to, of = span.pick(targets), span.pick(sources)
        if not span.raw:
            units.append(functools.partial(torch._foreach_copy_, to, of))
        elif span.length < 0:
            units.append(functools.partial(_move_all, to, of))
        elif _alike(to[0], of[0]):
            move = functools.partial(_memmove, to[0].data_ptr() + span.start, of[0].data_ptr() + span.start)
            units.append(functools.partial(move, span.length))
        elif span.start == 0:
            units.append(functools.partial(to[0].copy_, of[0]))
    in_two_threads(units, nbytes, meanwhile)


def _move_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if _alike(target, source):
            _memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            target.copy_(source)


def _alike(target: Tensor, source: Tensor) -> bool:
    """Whether to copy one into the other is to copy its bytes."""
    if source.is_conj() != target.is_conj() or source.is_neg() != target.is_neg():
        return False
    if target.is_contiguous():
        return source.is_contiguous()
    return target.stride() == source.stride() and is_dense(target.shape, target.stride())


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

    try:
        helper = _helper().submit(work)
    except RuntimeError:
        # The interpreter is ending and starts no threads any more.
        helper = concurrent.futures.Future()
        helper.cancel()
    try:
        if meanwhile is not None:
            meanwhile()
        work()
    finally:
        # Even if this thread failed: the helper must not write after we have returned. One that has not begun, because
        # another save of this process keeps it busy, is not needed any more.
        failure = None if helper.cancel() else _outcome(helper)
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
