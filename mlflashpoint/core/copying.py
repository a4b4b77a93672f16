"""Copies many tensors between host memory with two threads: the calling one and a helper.

One thread does not saturate the memory of a machine that trains, and the helper costs nothing between saves. Tensors
whose bytes can be taken as they are go in portions of some megabytes, a single call each; the others go through torch.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlflashpoint.core import streaming
from mlflashpoint.errors import DeadlineExceededError

#: bytes that a thread moves at a time
BLOCK = 8 << 20
#: the same without our own library: the C library writes past the caches from such a size on
PLAIN_BLOCK = 128 << 20
#: below this many bytes waking a helper costs more than it saves
_WORTH_A_THREAD = 2 << 20
_DEADLINE_S = 600.0
_HEAD_START_S = 0.001

Unit = Callable[[], object]


class Schedule:
    """How to copy tensors of given sizes, planned once for all saves or loads of one form.

    Args:
        sizes: bytes of each.
        raw: whether each is to be moved as memory: source and target are dense, of one stride, and neither is a
            conjugate or negative view. The others are copied by torch.

    Attributes:
        odd: positions of those that are not raw.
        nbytes: of all.
    """

    def __init__(self, sizes: Sequence[int], raw: Sequence[bool]) -> None:
        self.odd = [place for place, moved in enumerate(raw) if not moved]
        self.nbytes = sum(sizes)
        self._sizes = sizes
        self._places: list[int] = []
        self._offsets: list[int] = []
        lengths: list[int] = []
        self._portions: list[tuple[int, int]] = []
        begin, filled = 0, 0
        for place, (nbytes, moved) in enumerate(zip(sizes, raw, strict=True)):
            block = BLOCK if streaming.available() or nbytes < 2 * PLAIN_BLOCK else PLAIN_BLOCK
            for offset in range(0, max(nbytes, 1) if moved else 0, block):
                length = min(block, nbytes - offset)
                self._places.append(place)
                self._offsets.append(offset)
                lengths.append(length)
                filled += length
                if filled >= BLOCK:
                    self._portions.append((begin, len(lengths)))
                    begin, filled = len(lengths), 0
        if begin < len(lengths):
            self._portions.append((begin, len(lengths)))
        self._whole = self._places == list(range(len(sizes))) and not any(self._offsets)
        self._lengths = streaming.addresses(lengths)

    def addresses(self, of: Sequence[int]) -> array[int]:
        """Where to move from, or to: from the addresses of all tensors."""
        if self._whole:
            return streaming.addresses(of)
        pieces = zip(self._places, self._offsets, strict=True)
        return streaming.addresses([of[place] + offset for place, offset in pieces])

    def copy(
        self,
        to: array[int],
        of: array[int],
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Copy all; returns when it is done.

        Args:
            to: where to, from ``addresses``.
            of: where from, likewise.
            targets: of the odd ones, in their order.
            sources: likewise.
            meanwhile: what this thread does before it joins in.
        """
        portions = self._portions
        if meanwhile is not None and len(portions) > 2:
            # What this thread does meanwhile holds the interpreter's lock, for which the helper would wait after each.
            half = len(portions) // 2
            portions = [(0, portions[half - 1][1]), *portions[half:]]
        units: list[Unit] = [functools.partial(streaming.move, to, of, self._lengths, *portion) for portion in portions]
        first, filled = 0, 0
        for last, place in enumerate(self.odd):
            filled += self._sizes[place]
            if filled >= BLOCK or last == len(self.odd) - 1:
                part = slice(first, last + 1)
                units.append(functools.partial(_copy_each, targets[part], sources[part]))
                first, filled = last + 1, 0
        in_two_threads(units, self.nbytes, meanwhile)


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    # One by one: torch's call for many refuses negative views.
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


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
    begun = threading.Event()

    def work() -> None:
        begun.set()
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
            # Else the helper waits for the interpreter's lock while we hold it. It may be busy with another save.
            begun.wait(_HEAD_START_S)
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
