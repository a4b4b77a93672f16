"""The planner: rank 0's part of a recovery. Gathers manifests, plans, publishes, strikes out what turned out bad."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.manifest import copies_from_json, copy_to_json, with_holders
from mlflashpoint.core.plan import plan_recovery
from mlflashpoint.core.record import ShardCopy
from mlflashpoint.core.room import Room
from mlflashpoint.core.roster import Member

log = logging.getLogger("mlflashpoint.core")

T = TypeVar("T")

#: entries per record in the job's store
CHUNK = 512
#: how many skipped, and how many complete, versions the ranks tell each other of
_SHOWN = 16


@dataclass(frozen=True)
class Wish:
    """What the job asks for; rank 0's counts. A ``durable_step`` of -1 is none, as None is."""

    group: str = "default"
    durable_step: int | None = None
    topology: str | None = None
    reshard: bool = False


class Planner:
    """Made once per recovery, on rank 0, when it has joined; waits for the manifests of all nodes.

    Raises:
        DeadlineExceededError: ranks did not answer in time; names them.
        PeerError: another rank gave up, or the job's store can't be reached.
        ShardFormatError: a node's manifest is malformed.
    """

    def __init__(self, room: Room, members: Sequence[Member], wish: Wish, remote: bool) -> None:
        self._members = members
        self._wish = wish
        self._remote = remote
        self._bad: set[tuple[str, str]] = set()
        room.all_arrived("listed")
        leaders = [member.rank for member in members if member.leader]
        manifests = room.channel.read_many([f"manifest/{rank}" for rank in leaders])
        starts: list[Incarnation] = []
        keys: list[str] = []
        for rank, manifest in zip(leaders, manifests, strict=True):
            starts += Lineage.from_json(manifest["lineage"]).starts
            keys += [f"copies/{rank}/{index}" for index in range(int(manifest["chunks"]))]
        self._lineage = Lineage.of(starts)
        holders = {(member.node, member.seat): member.rank for member in members}
        chunks = room.channel.read_many(keys)
        self._copies = [copy for chunk in chunks for copy in with_holders(copies_from_json(chunk), holders)]

    def publish(self, talk: Channel) -> None:
        """Plan with what is not struck out, and tell all ranks under ``talk``."""
        without = [member for member in self._members if member.problem is not None]
        plan = plan_recovery(
            self._copies,
            len(self._members),
            placement={member.rank: member.node for member in self._members},
            durable_step=self._wish.durable_step,
            excluded=self._bad,
            lineage=self._lineage,
            group=self._wish.group,
            topology=self._wish.topology,
            reshard=self._wish.reshard,
            remote=self._remote,
        )
        version, reason = plan.version, plan.reason
        if without:
            version, reason = None, f"rank {without[0].rank} has no memory store: {without[0].problem}"
        if version is not None:
            for shards in _batches(list(plan.sources.items())):
                talk.post_many({f"shard/{rank}": list(map(copy_to_json, copies)) for rank, copies in shards})
            if version.world_size != len(self._members):
                talk.post_many({f"duty/{rank}": shards for rank, shards in _duties(plan.sources).items()})
        for skipped in plan.skipped[:_SHOWN]:
            # One that was tried in vain is given up for good, so the operator has to hear of it.
            level = logging.WARNING if self._bad else logging.INFO
            text = "passed over step %d of incarnation %d: %s"
            log.log(level, text, skipped.step, skipped.incarnation, skipped.reason)
        if any(member.rank != 0 for member in without):
            # Who asks takes it for a first start. What rank 0 itself lacks it says for itself, as every rank does.
            log.error("nothing can be loaded from memory, where there may be a version: %s", reason)
        else:
            log.info("recovery: %s", reason)
        talk.post(
            "header",
            {
                "version": version,
                "reason": reason,
                "place": plan.place,
                "complete": plan.complete[:_SHOWN],
                "reshardable": plan.reshardable,
                "skipped": [[item.step, item.incarnation, item.reason] for item in plan.skipped[:_SHOWN]],
                "lineage": self._lineage.to_json(),
                "group": plan.group,
            },
        )

    def settle(self, talk: Channel) -> bool:
        """Whether every rank can load its shard; if not, the copies that were found bad are struck out."""
        reports = talk.read_many([f"bad/{number}" for number in range(1, talk.add("bad", 0) + 1)])
        self._bad |= {(str(node), str(slot)) for report in reports for node, slot in report["copies"]}
        return not any(report["lost"] for report in reports)


def _duties(sources: Mapping[int, Sequence[ShardCopy]]) -> dict[int, list[int]]:
    """Which shards each rank checks when the version has another number of ranks: those that its own seat holds."""
    duties: dict[int, list[int]] = {}
    for shard, copies in sources.items():
        duties.setdefault(copies[0].holder, []).append(shard)
    return duties


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]
