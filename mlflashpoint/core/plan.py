"""The recovery plan: from what is left anywhere to one version and, for each rank, where its shard comes from.

Pure: no file, no process, no clock. Rank 0 runs it once per start and publishes the result, so all ranks take the same
decision. Its cost is linear in the number of copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.ranks import named
from mlflashpoint.core.record import DRAIN_NODE, ShardCopy

_Ranks = dict[int, list[ShardCopy]]


class VersionKey(NamedTuple):
    """What the shards of one version have in common; shards that differ in any of it never mix."""

    incarnation: int
    run: str
    step: int
    world_size: int
    topology: str


@dataclass(frozen=True)
class SkippedVersion:
    """A version that was not chosen, and why."""

    step: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class RecoveryPlan:
    """What to recover.

    Attributes:
        step: step to go on from, -1 if nothing in memory is to be loaded.
        incarnation: start of the job that saved it, 0 for none.
        group: the group of ranks.
        sources: for each rank *of the version* where its shard can be had, best first: own seat, own node, other
            nodes' own, replicas elsewhere. Empty if ``step`` is -1.
        skipped: the versions that were passed over, newest first.
        reason: one line: what was chosen, or why nothing was.
        place: where the version chosen lies, in words: in memory, in the drain directory, or in both together.
        version: the version chosen; its ``world_size`` differs from the job's only if resharding was allowed.
        reshardable: the newest complete version, if one that is saved by another world size or layout is newer than
            what was chosen; it needs resharding.
        complete: every complete version of any layout, newest first, whether or not it was chosen. The newest at or
            below the step that training goes on from must survive until a newer one is complete.
    """

    step: int
    incarnation: int
    group: str
    sources: Mapping[int, tuple[ShardCopy, ...]] = field(repr=False)
    skipped: tuple[SkippedVersion, ...]
    reason: str
    place: str = "memory"
    version: VersionKey | None = None
    reshardable: VersionKey | None = None
    complete: tuple[VersionKey, ...] = ()


def plan_recovery(
    copies: Iterable[ShardCopy],
    world_size: int,
    *,
    placement: Mapping[int, str],
    durable_step: int | None = None,
    excluded: Collection[tuple[str, str]] = frozenset(),
    lineage: Lineage | None = None,
    group: str = "default",
    topology: str | None = None,
    reshard: bool = False,
    remote: bool = True,
) -> RecoveryPlan:
    """Choose the newest version of which every shard can be had.

    Args:
        copies: every copy that anybody holds; those of other groups are passed over.
        world_size: ranks of the job now.
        placement: rank of the job now -> identity of its node's memory container.
        durable_step: newest step in durable storage; memory is used only if it is not older.
        excluded: ``(node, slot)`` of copies that are bad, or could not be fetched.
        lineage: the starts of the job that any node knows of.
        group: the group of ranks to recover.
        topology: layout that a version must have to be loaded as it is; None accepts each.
        reshard: whether a version of another world size or layout may be chosen.
        remote: whether a rank can fetch a shard from another node's memory.

    Returns:
        the plan; ``step`` -1 and a reason if there is nothing to recover.
    """
    versions: dict[VersionKey, _Ranks] = {}
    by_tuple: dict[tuple[int, str, int, int, str], _Ranks] = {}
    bad: dict[VersionKey, int] = defaultdict(int)
    for copy in copies:
        record = copy.record
        if record.group != group:
            continue
        # A plain tuple is made several times faster than a named one: this line runs once per copy.
        fields = (record.incarnation, record.run, record.step, record.world_size, record.topology)
        ranks = by_tuple.get(fields)
        if ranks is None:
            ranks = by_tuple[fields] = versions[VersionKey(*fields)] = {}
        if excluded and (copy.node, copy.slot) in excluded:
            bad[VersionKey(*fields)] += 1
            continue
        found = ranks.get(record.rank)
        if found is None:
            ranks[record.rank] = [copy]
        else:
            found.append(copy)

    known = _with_records(lineage or Lineage(), versions)
    order = {(start.number, start.run): index for index, start in enumerate(known.starts)}
    newest_first = sorted(
        versions, key=lambda key: (key.incarnation, order.get(key[:2], -1), key.step, key[3:]), reverse=True
    )
    skipped: list[SkippedVersion] = []
    complete: list[VersionKey] = []
    reshardable: VersionKey | None = None
    chosen: VersionKey | None = None
    for key in newest_first:
        ranks = versions[key]
        same_layout = key.world_size == world_size and topology in (None, key.topology)
        needed_at = None if remote else _needed_at(key, placement, same_layout)
        reason = _abandoned(key, ranks, known) or _incomplete(key, ranks, bad[key], needed_at)
        if reason is None:
            complete.append(key)
            if durable_step is not None and durable_step > key.step:
                reason = f"the durable checkpoint of step {durable_step} is newer"
            elif not same_layout and not reshard:
                reshardable = reshardable or (key if chosen is None else None)
                reason = _mismatch(key, world_size, topology)
        if chosen is None and reason is None:
            chosen = key
        elif chosen is None:
            skipped.append(SkippedVersion(key.step, key.incarnation, reason or ""))
    if chosen is not None:
        same_layout = chosen.world_size == world_size and topology in (None, chosen.topology)
        needed_at = None if remote else _needed_at(chosen, placement, same_layout)
        place, which = _place(versions[chosen], needed_at)
        return RecoveryPlan(
            step=chosen.step,
            incarnation=chosen.incarnation,
            group=group,
            sources=_ordered(versions[chosen], placement, same_layout),
            skipped=tuple(skipped),
            reason=f"step {chosen.step} of incarnation {chosen.incarnation} is complete in {place}{which}",
            place=place,
            version=chosen,
            reshardable=reshardable,
            complete=tuple(complete),
        )
    why = f"; newest: step {skipped[0].step}: {skipped[0].reason}" if skipped else ", it holds no version"
    return RecoveryPlan(
        step=-1,
        incarnation=0,
        group=group,
        sources={},
        skipped=tuple(skipped),
        reason=f"nothing to recover from memory{why}",
        reshardable=reshardable,
        complete=tuple(complete),
    )


def _with_records(lineage: Lineage, versions: Mapping[VersionKey, _Ranks]) -> Lineage:
    """Add what the commit records themselves tell of their starts: a node may have lost its lineage file."""
    starts = {(start.number, start.run): start for start in lineage.starts}
    for key, ranks in versions.items():
        for copies in ranks.values():
            record = copies[0].record
            known = starts.get((key.incarnation, key.run))
            if known is None:
                known = Incarnation(key.incarnation, key.run, record.created_s)
            if known.resumed_from is None:
                known = known.resumed(record.resumed_from)
            starts[key.incarnation, key.run] = known
            break
    return Lineage.of(starts.values())


def _abandoned(key: VersionKey, ranks: _Ranks, lineage: Lineage) -> str | None:
    return abandoned(key, next((copies[0].record.created_s for copies in ranks.values()), 0.0), lineage)


def abandoned(key: VersionKey, created_s: float, lineage: Lineage) -> str | None:
    """Why the version, saved at ``created_s``, does not count any more; None if it does."""
    horizon = lineage.horizon(key.incarnation, key.run, created_s)
    if key.step <= horizon:
        return None
    where = "nothing" if horizon < 0 else f"step {horizon}"
    return f"abandoned: a later start of the job went on from {where}"


def _incomplete(key: VersionKey, ranks: _Ranks, bad: int, needed_at: Mapping[int, str] | None) -> str | None:
    """Why the version can't be put together, None if it can.

    ``needed_at``: rank of the version -> the only node where it can use a copy, ``""`` for none; None if anywhere does.
    """
    missing = [rank for rank in range(key.world_size) if rank not in ranks]
    if missing:
        suffix = f" ({bad} {'copy' if bad == 1 else 'copies'} bad or out of reach)" if bad else ""
        return f"no copy of the shards of {named(missing)}{suffix}"
    if needed_at is None:
        return None
    far = [
        rank
        for rank, copies in ranks.items()
        if all(copy.node not in (needed_at.get(rank), DRAIN_NODE) for copy in copies)
    ]
    return f"only other nodes hold the shards of {named(sorted(far))}" if far else None


def _needed_at(key: VersionKey, placement: Mapping[int, str], same_layout: bool) -> Mapping[int, str]:
    if same_layout:
        return placement
    # To reshard, any rank may need any shard.
    nodes = set(placement.values())
    return dict.fromkeys(range(key.world_size), nodes.pop() if len(nodes) == 1 else "")


def _ordered(ranks: _Ranks, placement: Mapping[int, str], same_layout: bool) -> dict[int, tuple[ShardCopy, ...]]:
    sources: dict[int, tuple[ShardCopy, ...]] = {}
    for rank, copies in ranks.items():
        if len(copies) > 1:
            node = placement.get(rank) if same_layout else None

            def distance(copy: ShardCopy, rank: int = rank, node: str | None = node) -> int:
                if copy.node == node:
                    return 0 if copy.holder == rank and not copy.replica else 1
                if copy.node == DRAIN_NODE:
                    return 4
                return 3 if copy.replica else 2

            copies.sort(key=distance)
        sources[rank] = tuple(copies)
    return sources


def _place(ranks: _Ranks, needed_at: Mapping[int, str] | None) -> tuple[str, str]:
    """Where the version lies, and which shards have to come from the drain directory if only some do."""
    drained = sorted(
        rank
        for rank, copies in ranks.items()
        if all(
            copy.node == DRAIN_NODE or (needed_at is not None and copy.node != needed_at.get(rank)) for copy in copies
        )
    )
    if not drained:
        return "memory", ""
    if len(drained) == len(ranks):
        return "the drain directory", ""
    return "memory and the drain directory", f" (there the shard{'s' * (len(drained) > 1)} of {named(drained)})"


def _mismatch(key: VersionKey, world_size: int, topology: str | None) -> str:
    if key.world_size != world_size:
        return f"TopologyMismatch: saved by {key.world_size} ranks, the job has {world_size}; it needs resharding"
    return f"TopologyMismatch: saved with layout {key.topology!r}, the job has {topology!r}; it needs resharding"
