"""The exchange: this rank's dealings with the memory of other nodes.

It sends replicas and keeps those of others; it offers what lies here and fetches what lies elsewhere.

Nothing of it exists before it is needed: on one node there is no thread and no link. What fails in here fails the call
and never the job, and no call waits longer than it was told to.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from mlflashpoint.core.counters import Counters, Stats
from mlflashpoint.core.endpoint import Endpoint
from mlflashpoint.core.fetched import Fetched, RoomFor
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.lagfile import SeatLag
from mlflashpoint.core.placement import Placement
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardCopy, ShardRecord
from mlflashpoint.core.replicas import Parcel
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.session import Session
from mlflashpoint.core.slot import Slot
from mlflashpoint.errors import FlashpointError, ReplicationError
from mlflashpoint.replication.delivery import Delivery, OutgoingShard, ReplicationLag
from mlflashpoint.replication.gather import Source

log = logging.getLogger("mlflashpoint.core")

#: how long a save may be held up by somebody who still reads what it is about to overwrite; digests tell him then
_WITHDRAW_S = 2.0


class Exchange:
    """One rank's access to other nodes; thread-safe.

    Args:
        session: an opened session.
        counters: where to count.
        keep: versions that other nodes must keep the replicas of.
        obsolete: whether nobody will ever need a shard.
        began: whether this rank's own slots are in use.
        keeps: whether it takes replicas in, and keeps what it fetches, in this node's memory.
    """

    def __init__(
        self,
        session: Session,
        counters: Counters,
        *,
        keep: Callable[[], Collection[Version]],
        obsolete: Callable[[ShardRecord], bool],
        began: Callable[[], bool],
        keeps: bool = True,
    ) -> None:
        self._session = session
        self._counters = counters
        self._keep = keep
        self._began = began
        self._keeps = keeps
        self._endpoint = Endpoint(session, obsolete=obsolete, reused=self.withdraw, keeps=keeps)
        self._offered: dict[Path, str] = {}
        self._reported = self._endpoint.lag()

    @property
    def placement(self) -> Placement:
        """Its part in the replication; none before it has joined."""
        joined = self._session.joined_already
        return Placement() if joined is None else joined.placement

    @property
    def linked(self) -> bool:
        """Whether shards can be had from other nodes."""
        return self.placement.linked

    @property
    def sends(self) -> bool:
        """Whether this rank's shards have replicas."""
        return bool(self.placement.holders)

    @property
    def receiving(self) -> bool:
        """Whether a replica is coming in at this moment."""
        replicas = self._endpoint.replicas
        return replicas is not None and replicas.receiving

    def open(self) -> None:
        """Be there for the others, if there are any. Raises nothing: what fails is logged, and tried again."""
        if self.linked and self._endpoint.replicator is None:
            try:
                self._endpoint.open()
            except FlashpointError as error:
                self._counters.failure("this rank can't reach other nodes", error)

    def send(self, slot: Slot, record: ShardRecord, over: Callable[[FlashpointError | None], None]) -> None:
        """Send what has just been committed to ``slot`` to all its holders, in the background.

        Args:
            slot: must not change until ``over`` is called.
            record: its commit record.
            over: called once, when every holder has acknowledged (None) or some have not (why).

        Raises:
            FlashpointError: it can't even begin; ``over`` is not called then.
        """
        delivery = self._endpoint.open().submit(self._outgoing(Holding.of(slot, record)))
        delivery.add_done_callback(lambda done: over(_error_of(done)))

    def rebuild(self, copies: Sequence[ShardCopy], holding: Callable[[], Holding]) -> None:
        """Give this rank's shard, of which ``copies`` are left, to its holders that have none; in the background.

        Should the shard be overwritten before all have it, a newer version is complete, and their check fails.
        """
        have = {copy.node for copy in copies}
        lacking = [rank for rank, node in self.placement.nodes.items() if node not in have]
        if not lacking:
            return
        try:
            shard = self._outgoing(holding())
            log.info("rank %d rebuilds its replicas of step %d on ranks %s", self._rank, shard.step, lacking)
            self._endpoint.open().submit(shard, holders=lacking)
        except FlashpointError as error:
            self._counters.failure("the replicas could not be rebuilt", error)

    def offer(self, copies: Iterable[tuple[ShardCopy, Path]]) -> None:
        """Let other nodes fetch these copies on this node, each under its slot's name, until ``withdraw``."""
        self.withdraw()
        try:
            replicator = self._endpoint.open()
        except FlashpointError as error:
            self._counters.failure("other nodes can't fetch what this rank holds", error)
            return
        for copy, path in copies:
            try:
                held = Holding.open(path)
                if held.record != copy.record:
                    continue
                shard = OutgoingShard(held.record.to_json(), held.buffers, step=held.record.step)
                replicator.offer(copy.slot, shard, timeout_s=_WITHDRAW_S)
                self._offered[path] = copy.slot
            except FlashpointError as error:
                log.warning("not offered to other nodes: %s", error)

    def withdraw(self, slot: Path | None = None) -> None:
        """End the offer of what a slot holds, or all offers: it is about to be overwritten.

        Waits a moment for those who still read.
        """
        for path in list(self._offered) if slot is None else [slot]:
            key, replicator = self._offered.pop(path, None), self._endpoint.replicator
            if key is None or replicator is None:
                continue
            try:
                replicator.withdraw(key, timeout_s=_WITHDRAW_S)
            except FlashpointError as error:
                log.debug("an offer ends while it is being read: %s", error)

    def fetch(self, copies: Sequence[ShardCopy], *, timeout_s: float, keep: bool) -> Fetched:
        """Pull one shard from all its copies on other nodes at once, and check its digests.

        Args:
            copies: of one shard; at least one.
            timeout_s: end of it all.
            keep: keep it in this node's memory, if there is room.

        Raises:
            ReplicationError: no copy could be pulled; tells why of each.
            FlashpointError: this rank can't reach other nodes.
        """
        record = copies[0].record
        replicator = self._endpoint.open()
        room = RoomFor(record, self._session.seat, self._endpoint.replicas, own=not self._began())
        sources = {Source(copy.holder, copy.slot): copy for copy in copies}
        try:
            got = replicator.fetch(
                list(sources),
                allocate=lambda _, sizes: room.allocate(sizes, keep=keep and self._keeps),
                verify=lambda _, buffers: _verify(record, buffers),
                timeout_s=timeout_s,
                header=record.to_json(),
            )
        except FlashpointError as error:
            room.give_up(error)
            raise
        bad = [sources[source] for source in got.failures]
        return room.keep(got.buffers, bad)

    def free_strays(self) -> None:
        """Free the replicas of ranks that send none here any more, when a version of this start is complete.

        Raises nothing: they only take up memory.
        """
        try:
            freed = self._endpoint.free_strays()
        except (FlashpointError, OSError) as error:
            log.warning("old replicas could not be freed: %s", error)
            return
        if freed:
            log.info("rank %d: freed %d bytes of replicas that nobody sends here any more", self._rank, freed)

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing is on its way to other nodes within ``timeout_s`` seconds."""
        replicator = self._endpoint.replicator
        return replicator is None or replicator.wait_idle(timeout_s)

    def lag(self) -> ReplicationLag:
        """How far the replicas are behind."""
        return self._endpoint.lag()

    def stats(self) -> Stats:
        """The lag in numbers, for metrics; bytes, seconds and counts."""
        lag = self.lag()
        return {
            "replicas": len(self.placement.holders),
            "replica_bytes_outstanding": lag.bytes_outstanding,
            "replica_age_s": round(lag.age_s, 3),
            "replicas_acknowledged": lag.acknowledged,
            "replicas_failed": lag.failed,
            "replicas_received": lag.received,
            "replicas_refused": lag.refused,
            "replica_last_error": lag.last_error or str(self._endpoint.problem or ""),
        }

    def report(self) -> None:
        """Tell ``mlflashpoint status`` how far the replicas are behind, if there is anything new."""
        if not self.linked or self._session.problem is not None:
            return
        lag = dataclasses.replace(self.lag(), age_s=0.0)
        if lag == self._reported:
            return
        self._reported = lag
        try:
            SeatLag.of(self.lag(), rank=self._rank, replicas=len(self.placement.holders)).write(self._session.seat)
        except OSError as error:
            log.debug("how far the replicas are behind could not be written: %s", error)

    def close(self, timeout_s: float) -> None:
        """End it all, bounded; may be called twice."""
        self._endpoint.close(timeout_s)
        self._offered.clear()

    @property
    def _rank(self) -> int:
        return self._session.ranks.rank

    def _outgoing(self, holding: Holding) -> OutgoingShard:
        parcel = Parcel(holding.record, frozenset(self._keep()))
        return OutgoingShard(parcel.to_bytes(), holding.buffers, step=holding.record.step)


def _error_of(delivery: Delivery) -> FlashpointError | None:
    return None if delivery.ok else next(iter(delivery.errors.values()), ReplicationError("no replica was made"))


def _verify(record: ShardRecord, buffers: Sequence[memoryview]) -> None:
    with ShardReader.from_buffers(record, bytes(buffers[0]), buffers[1]) as reader:
        reader.verify()
