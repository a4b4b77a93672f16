"""Recovery: the ranks find together what to go on from.

Each node's leader lists what its node holds; rank 0 plans once and publishes the plan; every rank checks the digests of
what it is to load and votes. If anybody lost its last source the bad copies are struck out and rank 0 plans again, so
all ranks fall back together: to another copy, to an older version, or to none. Each round strikes out a copy at least,
so it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.incarnation import Lineage
from mlflashpoint.core.manifest import copy_from_json, copy_to_json
from mlflashpoint.core.plan import SkippedVersion, VersionKey
from mlflashpoint.core.planner import CHUNK, Planner, Wish
from mlflashpoint.core.record import ShardCopy
from mlflashpoint.core.room import Room
from mlflashpoint.core.roster import Member
from mlflashpoint.errors import FlashpointError, PeerError, TopologyMismatchError

log = logging.getLogger("mlflashpoint.core")

#: part of what is left of the deadline that one attempt to fetch may take: time must remain for another version
_FETCH_SHARE = 0.35


@dataclass(frozen=True)
class Recovery:
    """What all ranks go on from: a version whose every shard was checked by the rank that is to load it.

    Attributes:
        step: training step of the version.
        version: names the version; its ``world_size`` differs from the job's if it is to be resharded.
        group: the group of ranks.
        reason: one line: why this one.
        place: where it lies, in words; see ``RecoveryPlan``.
        skipped: versions that were passed over, newest first, each with its reason.
        sources: copies of the shards that this rank checked, best first, by rank of the version.
        where: prefix in the job's store under which the sources of all other shards are listed.
    """

    step: int
    version: VersionKey
    group: str
    reason: str
    place: str = "memory"
    skipped: tuple[SkippedVersion, ...] = ()
    sources: Mapping[int, tuple[ShardCopy, ...]] = field(default_factory=dict, repr=False)
    where: str = field(default="", repr=False)

    @property
    def incarnation(self) -> int:
        return self.version.incarnation

    @property
    def world_size(self) -> int:
        return self.version.world_size

    @property
    def topology(self) -> str:
        return self.version.topology

    def require_world(self, world_size: int, *, rank: int) -> None:
        """Raises TopologyMismatchError unless as many ranks saved the version as the job has now."""
        if self.world_size != world_size:
            raise TopologyMismatchError(
                f"step {self.step} was saved by {self.world_size} ranks, the job has {world_size}",
                rank=rank,
                step=self.step,
                remedy="start the job with as many ranks, or let an adapter that can reshard load it",
            )


@dataclass(frozen=True)
class Decision:
    """What the ranks decided together, equal on all of them but for ``recovery.sources``.

    Attributes:
        recovery: what to load, None for nothing.
        reason: one line: what was chosen, or why nothing was.
        complete: every complete version, newest first; see ``RecoveryPlan``.
        reshardable: newest complete version that only resharding could load, if it was passed over.
        skipped: versions that were passed over.
        lineage: all that any node knows of the starts of the job.
    """

    recovery: Recovery | None
    reason: str
    complete: tuple[VersionKey, ...]
    reshardable: VersionKey | None
    skipped: tuple[SkippedVersion, ...]
    lineage: Lineage

    def under(self, prefix: str) -> Decision:
        """The same, with the place of the plan told from the group's channel."""
        if self.recovery is None:
            return self
        recovery = dataclasses.replace(self.recovery, where=f"{prefix}/{self.recovery.where}")
        return dataclasses.replace(self, recovery=recovery)


class Depot(Protocol):
    """How this rank reaches the memory of its node, and of others."""

    @property
    def remote(self) -> bool:
        """Whether a shard in another node's memory can be had."""

    def list(self) -> tuple[Sequence[ShardCopy], Lineage]:
        """The committed copies on this node, and what it knows of the job's starts."""

    def offer(self, *, leader: bool) -> None:
        """Let other nodes fetch what lies on this rank's seat; a node's leader also what lies where no rank sits."""

    def secure(
        self, copies: Sequence[ShardCopy], timeout_s: float
    ) -> tuple[tuple[ShardCopy, ...], Sequence[ShardCopy]]:
        """Make sure that this rank can read a shard; the usable copies, best first, and the others."""


def recover(room: Room, me: Member, members: Sequence[Member], depot: Depot, wish: Wish) -> Decision:
    """Find what to go on from; collective.

    Args:
        room: a conversation that only this recovery uses.
        me: this rank, as it joined.
        members: all ranks, on rank 0.
        depot: access to the copies.
        wish: what to look for; only rank 0's is used.

    Raises:
        DeadlineExceededError: ranks did not answer in time; names them.
        PeerError: another rank gave up, or the job's store can't be reached.
    """
    try:
        return _recover(room, me, members, depot, wish)
    except Exception as error:
        # The others would wait for this rank until the deadline. If they know already, the first reason holds.
        with contextlib.suppress(PeerError):
            room.call_off(f"rank {me.rank}: {error if isinstance(error, FlashpointError) else repr(error)}")
        raise


def _recover(room: Room, me: Member, members: Sequence[Member], depot: Depot, wish: Wish) -> Decision:
    room.enter()
    # Every rank has waited for its own background work: a list made before would lack the newest shards.
    room.arrive("flushed")
    if me.leader or depot.remote:
        room.all_arrived("flushed")
        # Before anybody is sent here to fetch something.
        depot.offer(leader=me.leader)
    if me.leader:
        _post_manifest(room, me, depot)
    room.arrive("listed")
    planner = Planner(room, members, wish, depot.remote) if me.rank == 0 else None
    attempt = 0
    while True:
        talk = room.channel.under(f"plan-{attempt}")
        if planner is not None:
            planner.publish(talk)
        header = room.until(partial(talk.read, "header"), lambda: room.held_up("flushed", "listed", then="planned"))
        decision, version = _from_header(header)
        if version is None:
            return decision
        duty = [me.rank] if version.world_size == room.world_size else talk.read(f"duty/{me.rank}") or []
        checked, bad = _secure_all(talk, duty, depot, room.remaining_s * _FETCH_SHARE)
        if bad:
            number = talk.add("bad")
            talk.post(f"bad/{number}", {"lost": not all(checked.values()), "copies": bad})
        room.arrive(f"checked-{attempt}")
        if planner is not None:
            room.all_arrived(f"checked-{attempt}")
            talk.post("agreed", planner.settle(talk))
        waits = partial(room.held_up, f"checked-{attempt}", then="settled")
        if room.until(partial(talk.read, "agreed"), waits) is True:
            recovery = Recovery(
                step=version.step,
                version=version,
                group=str(header["group"]),
                reason=decision.reason,
                place=str(header.get("place", "memory")),
                skipped=decision.skipped,
                sources=checked,
                where=f"plan-{attempt}",
            )
            return dataclasses.replace(decision, recovery=recovery)
        attempt += 1


def _post_manifest(room: Room, me: Member, depot: Depot) -> None:
    copies, lineage = depot.list()
    chunks = [copies[start : start + CHUNK] for start in range(0, len(copies), CHUNK)]
    for index, chunk in enumerate(chunks):
        room.channel.post(f"copies/{me.rank}/{index}", list(map(copy_to_json, chunk)))
    room.channel.post(f"manifest/{me.rank}", {"chunks": len(chunks), "lineage": lineage.to_json()})


def _secure_all(
    talk: Channel, shards: Iterable[int], depot: Depot, timeout_s: float
) -> tuple[dict[int, tuple[ShardCopy, ...]], list[tuple[str, str]]]:
    """The sources of ``shards`` without those that turned out bad before the first good one, and the bad ones."""
    checked: dict[int, tuple[ShardCopy, ...]] = {}
    bad: list[tuple[str, str]] = []
    for shard in shards:
        checked[shard], unusable = depot.secure(sources_of(talk, shard), timeout_s)
        bad += [(copy.node, copy.slot) for copy in unusable]
    return checked, bad


def sources_of(talk: Channel, shard: int) -> tuple[ShardCopy, ...]:
    """The copies of one shard as the plan lists them under ``talk``; raises PeerError if it lists none."""
    raw = talk.read(f"shard/{shard}")
    if not isinstance(raw, list):
        raise PeerError(f"the plan lists no sources for the shard of rank {shard}")
    return tuple(map(copy_from_json, raw))


def _from_header(header: Any) -> tuple[Decision, VersionKey | None]:
    try:
        skipped = tuple(SkippedVersion(int(step), int(number), str(why)) for step, number, why in header["skipped"])
        decision = Decision(
            recovery=None,
            reason=str(header["reason"]),
            complete=tuple(version for raw in header["complete"] if (version := _version(raw)) is not None),
            reshardable=_version(header["reshardable"]),
            skipped=skipped,
            lineage=Lineage.from_json(header["lineage"]),
        )
        return decision, _version(header["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"the published plan is malformed: {error}") from None


def _version(raw: Any) -> VersionKey | None:
    if raw is None:
        return None
    incarnation, run, step, world_size, topology = raw
    return VersionKey(int(incarnation), str(run), int(step), int(world_size), str(topology))
