"""The placement: which ranks keep this rank's replicas and whose it keeps, told to every rank when it joins."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflashpoint.core.member import Member
from mlflashpoint.errors import PeerError, SettingError
from mlflashpoint.replication.topology import RankPlacement, ReplicaMap, assign_replicas

log = logging.getLogger("mlflashpoint.core")

#: enough of the container's identity to tell two nodes of one host name apart
_SHOWN = 12


@dataclass(frozen=True)
class Placement:
    """One rank's part in the replication.

    Attributes:
        linked: whether the job has several nodes and replicates, so that shards can be had from other nodes.
        holders: ranks that keep this rank's replicas.
        owners: ranks whose replicas it keeps.
        nodes: holder -> identity of its node's memory container.
        discord: which rank has chosen which transport, if they differ: none can reach another then. Else empty.
    """

    linked: bool = False
    holders: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    discord: str = ""

    def to_json(self) -> dict[str, Any]:
        holders = [[rank, self.nodes[rank]] for rank in self.holders]
        return {"linked": self.linked, "holders": holders, "owners": list(self.owners), "discord": self.discord}

    @classmethod
    def from_json(cls, raw: Any) -> Placement:
        """Raises PeerError unless ``raw`` is what ``to_json`` gives."""
        try:
            holders = [(int(rank), str(node)) for rank, node in raw["holders"]]
            owners = tuple(map(int, raw["owners"]))
            ranks = tuple(rank for rank, _ in holders)
            return cls(raw["linked"] is True, ranks, owners, dict(holders), str(raw["discord"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"this rank's placement is malformed: {error}") from None


def place(members: Sequence[Member], replicas: int) -> dict[int, Placement]:
    """Assign the holders of every rank's replicas, and log in what way they are fewer than asked for.

    A rank without a memory store takes no part. A failure domain that some nodes have and others lack is an error in
    the log, and each node counts as a domain of its own.

    Args:
        members: all ranks of the job.
        replicas: copies of each shard on other failure domains.
    """
    able = [member for member in members if member.problem is None and member.node]
    unlinked = {member.rank: Placement() for member in members}
    if len({member.node for member in able}) < 2 or replicas == 0:
        if replicas and len(members) > 1:
            log.info("all ranks are on one node: there is nowhere to keep replicas")
        return unlinked
    try:
        assigned = assign_replicas([_placed(member, member.domain) for member in able], replicas)
    except SettingError as error:
        log.error("%s; until then each node counts as a failure domain of its own", error)
        assigned = assign_replicas([_placed(member, "") for member in able], replicas)
    for warning in assigned.warnings:
        log.warning("replication: %s", warning)
    node_of = {member.rank: member.node for member in able}
    discord = _discord(able)
    return {**unlinked, **{member.rank: _part(assigned, member.rank, node_of, discord) for member in able}}


def _discord(members: Sequence[Member]) -> str:
    first = {member.transport: member.rank for member in reversed(members)}
    if len(first) < 2:
        return ""
    return ", ".join(f"rank {rank} {transport}" for transport, rank in sorted(first.items(), key=lambda item: item[1]))


def _placed(member: Member, domain: str) -> RankPlacement:
    # The ring is sorted by these labels: they stay as they are when a restart gives the nodes other ranks.
    host = f"{member.host}/" if member.host else ""
    return RankPlacement(member.rank, f"{host}{member.node[:_SHOWN]}", domain or None)


def _part(assigned: ReplicaMap, rank: int, node_of: Mapping[int, str], discord: str) -> Placement:
    holders = assigned.holders[rank]
    return Placement(True, holders, assigned.owners[rank], {holder: node_of[holder] for holder in holders}, discord)
