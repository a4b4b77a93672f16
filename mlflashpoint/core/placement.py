"""The placement: which ranks keep this rank's replicas and whose it keeps, told to every rank when it joins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflashpoint.core.member import Member
from mlflashpoint.core.ranks import named
from mlflashpoint.errors import PeerError, SettingError
from mlflashpoint.replication.topology import RankPlacement, ReplicaMap, assign_replicas

log = logging.getLogger("mlflashpoint.core")

#: enough of the container's identity to tell two nodes of one host name apart
_SHOWN = 12
#: of the reason that a rank has no store
_TOLD = 300


@dataclass(frozen=True)
class Placement:
    """One rank's part in the replication.

    Attributes:
        linked: whether the job has several nodes and replicates, so that shards can be had from other nodes.
        holders: ranks that keep this rank's replicas.
        owners: ranks whose replicas it keeps.
        nodes: holder -> identity of its node's memory container.
        discord: which rank has chosen which transport, if they differ: none can reach another then. Else empty.
        storeless: which ranks have no memory store and why, so that no version can become complete. Else empty.
    """

    linked: bool = False
    holders: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    discord: str = ""
    storeless: str = ""

    def to_json(self) -> dict[str, Any]:
        holders = [[rank, self.nodes[rank]] for rank in self.holders]
        told = {"discord": self.discord, "storeless": self.storeless}
        return {"linked": self.linked, "holders": holders, "owners": list(self.owners), **told}

    @classmethod
    def from_json(cls, raw: Any) -> Placement:
        """Raises PeerError unless ``raw`` is what ``to_json`` gives."""
        try:
            holders = [(int(rank), str(node)) for rank, node in raw["holders"]]
            owners = tuple(map(int, raw["owners"]))
            ranks = tuple(rank for rank, _ in holders)
            told = str(raw["discord"]), str(raw["storeless"])
            return cls(raw["linked"] is True, ranks, owners, dict(holders), *told)
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
    storeless = _storeless(members)
    unlinked = {member.rank: Placement(storeless=storeless) for member in members}
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
    linked = Placement(True, discord=discord, storeless=storeless)
    return {**unlinked, **{member.rank: _part(linked, assigned, member.rank, node_of) for member in able}}


def _storeless(members: Sequence[Member]) -> str:
    without = [member for member in members if member.problem is not None]
    if not without:
        return ""
    ranks = named([member.rank for member in without])
    return f"{ranks} {'has' if len(without) == 1 else 'have'} no memory store: {str(without[0].problem)[:_TOLD]}"


def _discord(members: Sequence[Member]) -> str:
    first = {member.transport: member.rank for member in reversed(members)}
    if len(first) < 2:
        return ""
    return ", ".join(f"rank {rank} {transport}" for transport, rank in sorted(first.items(), key=lambda item: item[1]))


def _placed(member: Member, domain: str) -> RankPlacement:
    # The ring is sorted by these labels: they stay as they are when a restart gives the nodes other ranks.
    host = f"{member.host}/" if member.host else ""
    return RankPlacement(member.rank, f"{host}{member.node[:_SHOWN]}", domain or None)


def _part(linked: Placement, assigned: ReplicaMap, rank: int, node_of: Mapping[int, str]) -> Placement:
    holders = assigned.holders[rank]
    nodes = {holder: node_of[holder] for holder in holders}
    return dataclasses.replace(linked, holders=holders, owners=assigned.owners[rank], nodes=nodes)
