"""Who keeps whose replica: a pure function of where the ranks run.

All ranks stand in one ring, sorted by failure domain, then node, then rank. Let ``m`` be the size of the largest
domain. The j-th replica of a shard lies ``j * m`` places further on: far enough to have left every domain that the
shard touched before, and, as a shift is a permutation, every rank keeps exactly ``k`` replicas.

That works as long as no domain has more than ``1 / (k + 1)`` of the ranks. One that has more (two of three nodes in one
rack) can't keep as many as the others, even if it keeps one of every foreign shard; so it does that, stands outside
the ring, and its own shards are spread evenly over the ring.

The ring is made of labels and not of rank numbers, so a restart that gives the nodes other ranks moves no replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mlflashpoint.errors import SettingError

_DOMAIN_SETTING = "MLFLASHPOINT_FAILURE_DOMAIN"


@dataclass(frozen=True)
class RankPlacement:
    """Where one rank runs.

    Attributes:
        rank: global rank.
        node: label of its node, the same for all ranks of the node.
        domain: label of the node's failure domain (a rack, a power feed); None or empty when nobody set one, in which
            case every node is a domain of its own.
    """

    rank: int
    node: str
    domain: str | None = None


@dataclass(frozen=True)
class ReplicaMap:
    """Who keeps whose replica.

    Attributes:
        holders: rank -> the ranks that keep its replicas, nearest in the ring first; empty without replication.
        replicas: replicas that each shard has: ``k``, or fewer where there are too few domains.
        warnings: one line for each way in which the map falls short of what was asked for.
    """

    holders: Mapping[int, tuple[int, ...]]
    replicas: int
    warnings: tuple[str, ...] = field(default=())

    @cached_property
    def owners(self) -> Mapping[int, tuple[int, ...]]:
        """Rank -> the ranks whose replicas it keeps, in rank order."""
        owners: dict[int, list[int]] = {rank: [] for rank in self.holders}
        for owner in sorted(self.holders):
            for holder in self.holders[owner]:
                owners[holder].append(owner)
        return {rank: tuple(kept) for rank, kept in owners.items()}


def assign_replicas(placements: Iterable[RankPlacement], k: int) -> ReplicaMap:
    """Assign ``k`` holders in other failure domains to every rank; the same answer for any order of ``placements``.

    Raises:
        SettingError: ``k`` is negative, a rank appears twice, a node has two domain labels, or some nodes have a label
            and others have none.
    """
    if k < 0:
        raise SettingError("replicas can't be negative", setting="MLFLASHPOINT_REPLICAS", value=k)
    ranks = list(placements)
    domains = _domains(ranks)
    nothing = {placement.rank: () for placement in ranks}
    if k == 0 or not ranks:
        return ReplicaMap(nothing, 0)
    warnings = []
    if len(domains) == 1 and len({placement.node for placement in ranks}) > 1:
        label = next(iter(domains))
        warnings.append(
            f"all nodes are in failure domain {label!r}: replicas go to another node of it, and the loss of"
            " the whole domain loses them"
        )
        domains = _grouped(ranks, {placement.node: placement.node for placement in ranks})
    reachable = min(k, len(domains) - 1)
    if reachable < k:
        warnings.append(
            f"{len(domains)} failure domain{'s' * (len(domains) != 1)} allow{'s' * (len(domains) == 1)} {reachable}"
            f" replica{'s' * (reachable != 1)} of each shard, not the {k} asked for"
        )
    if reachable == 0:
        return ReplicaMap(nothing, 0, tuple(warnings))
    return ReplicaMap(_dealt([domains[label] for label in sorted(domains)], reachable), reachable, tuple(warnings))


def _domains(ranks: Sequence[RankPlacement]) -> dict[str, list[int]]:
    """Domain label -> its ranks in ring order; checks the labels."""
    if len({placement.rank for placement in ranks}) != len(ranks):
        raise SettingError("a rank is placed twice", remedy="give every rank exactly one placement")
    label_of: dict[str, str | None] = {}
    for placement in ranks:
        label = placement.domain or None
        if label_of.setdefault(placement.node, label) != label:
            raise SettingError(
                f"node {placement.node!r} has two failure domains, {label_of[placement.node]!r} and {label!r}",
                setting=_DOMAIN_SETTING,
                rank=placement.rank,
                remedy="set the same label for all ranks of a node",
            )
    unlabelled = sorted(node for node, label in label_of.items() if label is None)
    if unlabelled and len(unlabelled) < len(label_of):
        shown = ", ".join(map(repr, unlabelled[:3])) + (", ..." if len(unlabelled) > 3 else "")
        raise SettingError(
            f"{len(unlabelled)} of {len(label_of)} nodes have no failure domain ({shown}) while the others have one",
            setting=_DOMAIN_SETTING,
            rank=min(placement.rank for placement in ranks if placement.node == unlabelled[0]),
            remedy="set it on every node or on none",
        )
    return _grouped(ranks, {node: label or node for node, label in label_of.items()})


def _grouped(ranks: Sequence[RankPlacement], label_of: Mapping[str, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for placement in sorted(ranks, key=lambda p: (p.node, p.rank)):
        groups.setdefault(label_of[placement.node], []).append(placement.rank)
    return groups


def _dealt(members: Sequence[Sequence[int]], k: int) -> dict[int, tuple[int, ...]]:
    """The holders of every rank; ``members`` are the domains' ranks, more than ``k`` domains in ring order."""
    large = _too_large([len(group) for group in members], k)
    rest = [group for d, group in enumerate(members) if d not in large]
    ring = [rank for group in rest for rank in group]
    shift = max(map(len, rest))
    in_ring = k - len(large)
    holders = {
        rank: [ring[(position + j * shift) % len(ring)] for j in range(1, in_ring + 1)]
        for position, rank in enumerate(ring)
    }
    outside = [rank for d in sorted(large) for rank in members[d]]
    holders.update(zip(outside, _spread(len(outside), in_ring + 1, rest), strict=True))
    for d in sorted(large):
        foreign = [rank for group in members if group is not members[d] for rank in group]
        for turn, rank in enumerate(foreign):
            holders[rank].append(members[d][turn % len(members[d])])
    return {rank: tuple(kept) for rank, kept in holders.items()}


def _too_large(sizes: Sequence[int], k: int) -> set[int]:
    """Domains that can't fill their even share, even by keeping a replica of every shard that is not their own."""
    by_size = sorted(range(len(sizes)), key=lambda d: (-sizes[d], d))
    left = sum(sizes)
    large: set[int] = set()
    while len(large) < k and sizes[by_size[len(large)]] * (k - len(large) + 1) > left:
        left -= sizes[by_size[len(large)]]
        large.add(by_size[len(large)])
    return large


def _spread(shards: int, copies: int, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Deal ``copies`` of every shard to as many different groups, with loads within one of even.

    Each group takes its share, rounded, as one run of a long list; shard ``t`` takes the entries ``t``, ``t + shards``
    and so on. No share is larger than the number of shards (`_too_large` saw to that), so no shard meets a group twice.
    """
    total, size = shards * copies, sum(map(len, groups))
    dealt: list[int] = []
    members = 0
    for group in groups:
        members += len(group)
        share = total * members // size - len(dealt)
        dealt += [group[turn % len(group)] for turn in range(share)]
    return [dealt[shard::shards] for shard in range(shards)]
