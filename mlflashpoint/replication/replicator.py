"""Replication in the background: shards go out to their holders, replicas of other ranks come in.

The training thread only ever calls `submit`, which puts a shard into a queue. One thread for each holder sends, so that
a slow holder holds up no other; a few threads take in what peers send. What a replica is and where it is kept is the
business of the `ReplicaSink` that the core supplies.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mlflashpoint.errors import FlashpointError, ReplicationError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.delivery import Delivery, OutgoingShard, ReplicationLag
from mlflashpoint.replication.gather import STALL_S, Gathered, Source, gather
from mlflashpoint.replication.transport import Incoming, Transport, check_room

_log = logging.getLogger("mlflashpoint.replication")

_RECEIVE_S = 3600.0


class ReplicaSink(Protocol):
    """Where replicas of other ranks are kept. Called from background threads, for one shard of a source at a time."""

    def allocate(self, source: int, header: bytes, sizes: tuple[int, ...]) -> Sequence[memoryview]:
        """Room for a shard of ``source``: writable buffers of exactly these sizes. Raises FlashpointError if it can't.

        Any replica that lay there must be marked as gone before this returns.
        """

    def commit(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        """Check the digests of what was received and make it a replica. Raises FlashpointError if they are wrong."""

    def abandon(self, source: int, header: bytes, error: FlashpointError) -> None:
        """Give up what `allocate` gave: the transfer or its check failed."""


class Replicator:
    """Sends shards to their holders and takes in replicas.

    Args:
        transport: owned from here on; `close` closes it.
        holders: ranks that keep the replicas of this rank's shards (`assign_replicas`).
        sink: where replicas of other ranks go.
        timeout_s: longest time that one shard may take to be acknowledged.
        queue_depth: deliveries that may be on their way at once.
        receivers: shards that are taken in at once.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        holders: Sequence[int],
        sink: ReplicaSink,
        timeout_s: float,
        queue_depth: int = 2,
        receivers: int = 2,
    ) -> None:
        self.holders = tuple(holders)
        self._transport = transport
        self._sink = sink
        self._timeout_s = timeout_s
        self._queue_depth = queue_depth
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._outstanding: list[Delivery] = []
        self._queues: dict[int, queue.SimpleQueue[Delivery | None]] = {}
        self._threads: list[threading.Thread] = []
        self._in_trouble: set[str] = set()
        self._acknowledged = self._failed = self._received = self._refused = 0
        self._last_error = ""
        for number in range(receivers):
            self._start(self._take_in, f"mlflashpoint-receive-{number}")

    @property
    def rank(self) -> int:
        return self._transport.rank

    def submit(
        self, shard: OutgoingShard, *, holders: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> Delivery:
        """Send ``shard`` to its holders in the background. Never blocks.

        Args:
            shard: its buffers belong to the delivery until that is done.
            holders: other ranks than those of the constructor, for example those that lack it after a recovery.
            timeout_s: other deadline than that of the constructor.

        Raises:
            ReplicationError: ``queue_depth`` deliveries are on their way (ask `busy` or `wait_idle` first), or closed.
        """
        targets = self.holders if holders is None else tuple(holders)
        delivery = Delivery(shard, targets, Deadline(timeout_s or self._timeout_s))
        with self._lock:
            if self._closed:
                raise ReplicationError("replication is closed", rank=self.rank, step=shard.step)
            if len(self._outstanding) >= self._queue_depth:
                raise ReplicationError(
                    f"{len(self._outstanding)} shards are still on their way to their holders",
                    rank=self.rank,
                    step=shard.step,
                    remedy="save less often, or give replication more bandwidth: see 'mlflashpoint plan'",
                )
            if targets:
                self._outstanding.append(delivery)
                delivery.add_done_callback(self._ended)
            for holder in targets:
                if holder not in self._queues:
                    self._queues[holder] = queue.SimpleQueue()
                    self._start(self._send_to, f"mlflashpoint-send-{holder}", holder)
                self._queues[holder].put(delivery)
        return delivery

    def busy(self) -> bool:
        """Whether any delivery is not done."""
        with self._lock:
            return bool(self._outstanding)

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether all deliveries are done within ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._outstanding, timeout_s)

    def lag(self) -> ReplicationLag:
        with self._lock:
            outstanding = list(self._outstanding)
            numbers = self._acknowledged, self._failed, self._received, self._refused, self._last_error
        now = time.monotonic()
        return ReplicationLag(
            sum(delivery.bytes_outstanding for delivery in outstanding),
            len(outstanding),
            max((now - delivery.submitted_at for delivery in outstanding), default=0.0),
            *numbers,
        )

    def offer(self, key: str, shard: OutgoingShard, *, timeout_s: float) -> None:
        """Let any rank fetch ``shard`` under ``key``; its buffers must not change until `withdraw` has returned."""
        self._transport.offer(key, shard.header, shard.buffers, timeout_s=timeout_s)

    def withdraw(self, key: str, *, timeout_s: float) -> None:
        """End an offer. Raises DeadlineExceededError if somebody still reads it then."""
        self._transport.withdraw(key, timeout_s=timeout_s)

    def fetch(
        self,
        sources: Sequence[Source],
        *,
        allocate: Callable[[bytes, tuple[int, ...]], Sequence[memoryview]],
        verify: Callable[[bytes, Sequence[memoryview]], None],
        timeout_s: float,
        header: bytes | None = None,
    ) -> Gathered:
        """Pull one shard from all its sources at once; see `gather`."""
        return gather(
            self._transport,
            sources,
            allocate=allocate,
            verify=verify,
            timeout_s=timeout_s,
            header=header,
            # One that stalls must leave the others time to take over.
            stall_s=min(STALL_S, timeout_s / 3),
        )

    def close(self, *, timeout_s: float) -> None:
        """Stop: what is on its way fails with an error. Call `wait_idle` first to let it arrive."""
        deadline = Deadline(timeout_s)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
            for waiting in self._queues.values():
                waiting.put(None)
        self._transport.close(timeout_s=timeout_s)
        for thread in threads:
            thread.join(deadline.remaining_s)

    def _start(self, target: Callable[..., None], name: str, *arguments: int) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send_to(self, holder: int) -> None:
        waiting = self._queues[holder]
        while (delivery := waiting.get()) is not None:
            error = self._send(delivery, holder)
            self._tell(f"replicas to rank {holder}", error)
            delivery.settle(holder, error)

    def _send(self, delivery: Delivery, holder: int) -> FlashpointError | None:
        shard = delivery.shard
        try:
            if self._closed:
                raise ReplicationError("replication was closed", rank=holder, step=shard.step)
            delivery.deadline.left(f"turn to send to rank {holder}", rank=holder)
            self._transport.send(
                holder,
                shard.header,
                shard.buffers,
                timeout_s=max(0.001, delivery.deadline.remaining_s),
                progress=lambda nbytes: delivery.moved(holder, nbytes),
            )
        except FlashpointError as error:
            error.step = shard.step if error.step is None else error.step
            return error
        except Exception as error:
            # the thread serves every later shard: it must outlive whatever went wrong with this one
            _log.exception("sending the shard of step %d to rank %d failed", shard.step, holder)
            return ReplicationError(f"sending failed: {error!r}", rank=holder, step=shard.step)
        return None

    def _ended(self, delivery: Delivery) -> None:
        with self._idle:
            self._outstanding.remove(delivery)
            if delivery.ok:
                self._acknowledged += 1
            else:
                self._failed += 1
            self._idle.notify_all()

    def _take_in(self) -> None:
        while not self._closed:
            try:
                incoming = self._transport.receive(timeout_s=_RECEIVE_S)
                if incoming is not None:
                    error = self._take(incoming)
                    self._tell(f"replicas of rank {incoming.source}", error)
            except Exception:
                _log.exception("taking in a replica failed")

    def _take(self, incoming: Incoming) -> FlashpointError | None:
        source, header, allocated = incoming.source, incoming.header, False
        try:
            buffers = self._sink.allocate(source, header, incoming.sizes)
            allocated = True
            check_room(buffers, incoming.sizes)
            incoming.accept(buffers, timeout_s=self._timeout_s)
            self._sink.commit(source, header, buffers)
        except Exception as caught:
            error = caught if isinstance(caught, FlashpointError) else ReplicationError(f"{caught!r}", rank=source)
            if error is not caught:
                _log.exception("the sink of replicas failed")
            with self._lock:
                self._refused += 1
            if allocated:
                self._abandon(source, header, error)
            try:
                incoming.refuse(error, timeout_s=self._timeout_s)
            except FlashpointError as second:
                _log.debug("rank %d was not told why its shard was refused: %s", source, second)
            return error
        with self._lock:
            self._received += 1
        try:
            incoming.acknowledge(timeout_s=self._timeout_s)
        except FlashpointError as error:
            # the replica stands; only its owner does not know
            return error
        return None

    def _abandon(self, source: int, header: bytes, error: FlashpointError) -> None:
        try:
            self._sink.abandon(source, header, error)
        except Exception:
            # the sender must still hear of the first failure
            _log.exception("the sink of replicas failed to give up a shard")

    def _tell(self, what: str, error: FlashpointError | None) -> None:
        """Log the first failure of a kind and its end, not every one of a series."""
        with self._lock:
            if error is not None:
                self._last_error = str(error)
            quiet = self._closed or (what in self._in_trouble) == (error is not None)
            (self._in_trouble.discard if error is None else self._in_trouble.add)(what)
        if error is not None:
            _log.log(logging.DEBUG if quiet else logging.WARNING, "%s fail: %s", what, error)
        elif not quiet:
            _log.info("%s arrive again", what)
