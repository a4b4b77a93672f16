"""Pull one shard from all the ranks that have a copy of it, a range from each at a time.

A fast source serves more ranges than a slow one, and one that fails or stalls hands its range back to the others. What
was put together from several copies is checked as a whole. If it is wrong the copies are pulled one by one, so that the
good one is found and the bad one is named.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlflashpoint.errors import DeadlineExceededError, FlashpointError, ReplicationError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.memory import flat
from mlflashpoint.replication.transport import Transport, check_room

_log = logging.getLogger("mlflashpoint.replication")

RANGE_BYTES = 128 << 20
#: a source that takes longer over one range is stalled, while another one is there to take it over
STALL_S = 30.0
_GRACE_S = 10.0

Allocate = Callable[[bytes, tuple[int, ...]], Sequence[memoryview]]
Verify = Callable[[bytes, Sequence[memoryview]], None]


@dataclass(frozen=True)
class Source:
    """A rank that offers a copy, and the key under which it does."""

    rank: int
    key: str


@dataclass(frozen=True)
class Gathered:
    """A shard that was pulled and checked.

    Attributes:
        header: its header.
        buffers: the buffers that ``allocate`` gave, filled.
        bytes_from: rank -> bytes that came from it.
        failures: sources that could not be used, and why; a copy that is wrong in itself is among them.
    """

    header: bytes
    buffers: Sequence[memoryview]
    bytes_from: Mapping[int, int]
    failures: Mapping[Source, FlashpointError]


def gather(
    transport: Transport,
    sources: Sequence[Source],
    *,
    allocate: Allocate,
    verify: Verify,
    timeout_s: float,
    header: bytes | None = None,
    range_bytes: int = RANGE_BYTES,
    stall_s: float = STALL_S,
) -> Gathered:
    """Pull one shard from ``sources``, all at once.

    Args:
        transport: brings the bytes.
        sources: where there are copies, best first.
        allocate: called once with header and buffer lengths; gives writable buffers.
        verify: called with header and filled buffers; raises FlashpointError if a digest is wrong.
        timeout_s: end of it all, in seconds.
        header: the header that the shard must have, if known; otherwise that of the first source to answer.
        range_bytes: bytes asked for at once.
        stall_s: longest time for one range while another source is there.

    Raises:
        ReplicationError: no source has a good copy that could be pulled; tells why of each.
        FlashpointError: what ``allocate`` raised.
    """
    deadline = Deadline(timeout_s)
    together = list(dict.fromkeys(sources))
    failures: dict[Source, FlashpointError] = {}
    pull = _Pull(transport, allocate, header, deadline, range_bytes, stall_s)
    for attempt in [together, *([source] for source in together if len(together) > 1)]:
        # one that only was too slow for the others may still be the last hope
        usable = [source for source in attempt if isinstance(failures.get(source), (DeadlineExceededError, type(None)))]
        if not usable or deadline.expired:
            continue
        failures.update(pull.run(usable))
        if not pull.complete:
            continue
        try:
            verify(pull.header, pull.buffers)
        except FlashpointError as error:
            contributed = [source for source in usable if pull.bytes_from.get(source.rank)] or usable
            if len(contributed) == 1:
                failures[contributed[0]] = error
            _log.warning("a shard from ranks %s is wrong: %s", [source.rank for source in contributed], error)
            continue
        good = {source for source in usable if len(usable) == 1}
        left = {source: error for source, error in failures.items() if source not in good}
        return Gathered(pull.header, pull.buffers, dict(pull.bytes_from), left)
    told = "; ".join(f"rank {source.rank}: {error.message}" for source, error in failures.items())
    raise ReplicationError(
        f"no good copy could be pulled from {len(together)} sources ({told or 'there is none'})",
        rank=transport.rank,
        remedy="an older version, or a durable checkpoint, is tried next",
    )


class _Pull:
    """The ranges of one shard, and who is on which."""

    def __init__(
        self,
        transport: Transport,
        allocate: Allocate,
        header: bytes | None,
        deadline: Deadline,
        range_bytes: int,
        stall_s: float,
    ) -> None:
        self.header = header or b""
        self.buffers: Sequence[memoryview] = ()
        self.bytes_from: dict[int, int] = {}
        self._transport = transport
        self._allocate = allocate
        self._header_known = header is not None
        self._deadline = deadline
        self._range_bytes = range_bytes
        self._stall_s = stall_s
        self._sizes: tuple[int, ...] | None = None
        self._fatal: Exception | None = None
        self._changed = threading.Condition()
        self._turn = 0
        self._to_do: deque[tuple[int, int]] = deque()
        self._missing = 0
        self._active = 0

    @property
    def complete(self) -> bool:
        return self._sizes is not None and self._missing == 0

    def run(self, sources: Sequence[Source]) -> dict[Source, FlashpointError]:
        """Pull everything, anew; returns what went wrong with each source. Raises what ``allocate`` raised."""
        failures: dict[Source, FlashpointError] = {}
        with self._changed:
            # A thread of an earlier turn may still ask a dead source to describe itself; it finds out that it is late.
            self._turn += 1
            self._active = len(sources)
            self._reset()
        for source in sources:
            threading.Thread(
                target=self._work,
                args=(source, self._turn, failures),
                name=f"mlflashpoint-fetch-{source.rank}",
                daemon=True,
            ).start()
        with self._changed:
            # Every range in progress ends by its own deadline, so none is left that could still write into a buffer.
            ended = self._changed.wait_for(
                lambda: self.complete or self._active == 0, self._deadline.remaining_s + _GRACE_S
            )
            self._turn += 1
            if not ended:
                raise self._deadline.exceeded("end of a transfer that outlived its deadline")
            if self._fatal is not None:
                raise self._fatal
            return dict(failures)

    def _reset(self) -> None:
        self.bytes_from = {}
        self._to_do.clear()
        if self._sizes is not None:
            total = sum(self._sizes)
            starts = range(0, total, self._range_bytes)
            self._to_do.extend((start, min(self._range_bytes, total - start)) for start in starts)
            self._missing = len(self._to_do)

    def _work(self, source: Source, turn: int, failures: dict[Source, FlashpointError]) -> None:
        error: FlashpointError | None = None
        try:
            found, sizes = self._transport.describe(source.rank, source.key, timeout_s=self._timeout_s())
            if self._adopt(source, turn, found, sizes):
                while (part := self._next(turn)) is not None:
                    self._fetch(source, *part)
        except FlashpointError as caught:
            error = caught
        except Exception as caught:
            _log.exception("pulling from rank %d failed", source.rank)
            error = ReplicationError(f"pulling failed: {caught!r}", rank=source.rank)
        finally:
            with self._changed:
                if turn == self._turn:
                    if error is not None:
                        failures[source] = error
                    self._active -= 1
                    self._changed.notify_all()

    def _timeout_s(self) -> float:
        remaining = max(0.001, self._deadline.remaining_s)
        return min(remaining, self._stall_s) if self._active > 1 else remaining

    def _adopt(self, source: Source, turn: int, header: bytes, sizes: tuple[int, ...]) -> bool:
        """Take over header and sizes if they are the first, else compare; whether there is something to do."""
        with self._changed:
            if turn != self._turn or self._fatal is not None:
                return False
            if (self._header_known and header != self.header) or self._sizes not in (None, sizes):
                raise ReplicationError("it offers another shard", rank=source.rank)
            if self._sizes is None:
                try:
                    buffers = [flat(buffer) for buffer in self._allocate(header, sizes)]
                    check_room(buffers, sizes)
                except Exception as error:
                    self._fatal = error
                    return False
                self.header, self._header_known, self.buffers, self._sizes = header, True, buffers, sizes
                self._reset()
                self._changed.notify_all()
            return True

    def _next(self, turn: int) -> tuple[int, int] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._to_do or not self._missing or turn != self._turn, self._deadline.remaining_s
            )
            return self._to_do.popleft() if self._to_do and turn == self._turn else None

    def _fetch(self, source: Source, offset: int, length: int) -> None:
        done = False
        try:
            self._transport.fetch(
                source.rank, source.key, self.buffers, offset=offset, length=length, timeout_s=self._timeout_s()
            )
            done = True
        finally:
            with self._changed:
                if done:
                    self._missing -= 1
                    self.bytes_from[source.rank] = self.bytes_from.get(source.rank, 0) + length
                else:
                    self._to_do.appendleft((offset, length))
                self._changed.notify_all()
