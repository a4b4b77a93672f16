"""A shard on its way to the ranks that keep its replicas, and how far behind replication is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlflashpoint.errors import FlashpointError
from mlflashpoint.replication.deadline import Deadline

_log = logging.getLogger("mlflashpoint.replication")


@dataclass(frozen=True)
class OutgoingShard:
    """What is sent to the holders. Its buffers must not change until the delivery is done.

    Attributes:
        header: opaque bytes, at most `transport.MAX_HEADER_BYTES`: the commit record.
        buffers: the shard's bytes: index and data.
        step: training step, for log lines.
    """

    header: bytes
    buffers: Sequence[memoryview]
    step: int = -1

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class ReplicationLag:
    """How far replication is behind.

    Attributes:
        bytes_outstanding: bytes that holders have not taken yet, summed over the holders.
        shards_outstanding: deliveries that are not done.
        age_s: seconds since the oldest of these was submitted, 0 without any.
        acknowledged: deliveries that every holder acknowledged.
        failed: deliveries that some holder did not acknowledge.
        received: replicas taken in from peers.
        refused: shards of peers that were not taken in.
        last_error: what went wrong last, in one line; empty if nothing did.
    """

    bytes_outstanding: int
    shards_outstanding: int
    age_s: float
    acknowledged: int
    failed: int
    received: int
    refused: int
    last_error: str


class Delivery:
    """One submitted shard; thread-safe.

    Attributes:
        shard: what is sent.
        holders: the ranks that it is sent to.
        deadline: end of all attempts.
        submitted_at: `time.monotonic()` of the submission.
    """

    def __init__(self, shard: OutgoingShard, holders: Sequence[int], deadline: Deadline) -> None:
        self.shard = shard
        self.holders = tuple(holders)
        self.deadline = deadline
        self.submitted_at = time.monotonic()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._acknowledged: set[int] = set()
        self._errors: dict[int, FlashpointError] = {}
        self._sent: dict[int, int] = dict.fromkeys(self.holders, 0)
        self._callbacks: list[Callable[[Delivery], None]] = []
        if not self.holders:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether every holder has acknowledged or failed."""
        return self._done.is_set()

    @property
    def ok(self) -> bool:
        """Whether every holder has acknowledged: it stored the shard and its digest was right."""
        with self._lock:
            return len(self._acknowledged) == len(self.holders)

    @property
    def acknowledged(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._acknowledged)

    @property
    def errors(self) -> Mapping[int, FlashpointError]:
        """Holder -> why it has no replica."""
        with self._lock:
            return dict(self._errors)

    @property
    def bytes_outstanding(self) -> int:
        with self._lock:
            open_holders = set(self.holders) - self._acknowledged - set(self._errors)
            return sum(self.shard.nbytes - self._sent[holder] for holder in open_holders)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done within ``timeout_s`` seconds."""
        return self._done.wait(timeout_s)

    def add_done_callback(self, callback: Callable[[Delivery], None]) -> None:
        """Call ``callback`` once when done, in the thread that finds out; at once if it is done already."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def moved(self, holder: int, nbytes: int) -> None:
        with self._lock:
            self._sent[holder] += nbytes

    def settle(self, holder: int, error: FlashpointError | None) -> None:
        """Note that ``holder`` acknowledged, or why it did not."""
        with self._lock:
            if error is None:
                self._acknowledged.add(holder)
            else:
                self._errors[holder] = error
            if len(self._acknowledged) + len(self._errors) < len(self.holders):
                return
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback at the end of a delivery failed")
