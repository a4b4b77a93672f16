"""Failures of clusters that nobody owns, on the code that recovers real ones.

A cluster here is the list of all copies of all shards, as the manifests of its nodes would tell it after a few saves.
The replicas lie where `assign_replicas` puts them. A trial takes some nodes away and asks `plan_recovery` for a plan.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlflashpoint.core.plan import RecoveryPlan, plan_recovery
from mlflashpoint.core.record import ShardCopy, ShardRecord
from mlflashpoint.replication.topology import RankPlacement, assign_replicas

NEWEST_STEP = 200


@dataclass(frozen=True)
class Trial:
    """One failure.

    Attributes:
        failed: numbers of the nodes that failed.
        recovered: whether the plan goes on from a version in memory.
        plan_s: processor seconds that the plan took.
        plan_clock_s: the same on the clock.
    """

    failed: tuple[int, ...]
    recovered: bool
    plan_s: float
    plan_clock_s: float


class Cluster:
    """The copies that a job's nodes hold.

    Args:
        nodes, ranks_per_node: its shape.
        replicas: copies on other failure domains.
        nodes_per_domain: nodes that share a failure domain.
        versions: complete versions in memory; the newest is that of step ``NEWEST_STEP``.

    Attributes:
        holders: rank -> the ranks that keep its replicas.
        node_of: rank -> label of its node.
        copies: number of the node -> the copies that it holds.
    """

    def __init__(
        self, nodes: int, ranks_per_node: int, *, replicas: int, nodes_per_domain: int = 1, versions: int = 2
    ) -> None:
        world = nodes * ranks_per_node
        placements = [
            RankPlacement(
                rank, _node(rank // ranks_per_node), f"domain-{rank // ranks_per_node // nodes_per_domain:06d}"
            )
            for rank in range(world)
        ]
        self.nodes = nodes
        self.world = world
        self.nodes_per_domain = nodes_per_domain
        self.holders = assign_replicas(placements, replicas).holders
        self.node_of = {placement.rank: placement.node for placement in placements}
        self.copies: list[list[ShardCopy]] = [[] for _ in range(nodes)]
        for version in range(versions):
            for rank in range(world):
                record = _record(rank, world, NEWEST_STEP - 100 * version)
                for holder in (rank, *self.holders[rank]):
                    node = holder // ranks_per_node
                    replica = holder != rank
                    slot = f"default/seat-{holder % ranks_per_node}/{'replica' if replica else 'slot'}-{version}"
                    self.copies[node].append(ShardCopy(record, _node(node), holder, slot, replica))

    def left(self, failed: Iterable[int]) -> list[ShardCopy]:
        """All copies but those of the failed nodes."""
        gone = set(failed)
        return [copy for node, held in enumerate(self.copies) if node not in gone for copy in held]

    def recover(self, failed: Sequence[int]) -> tuple[RecoveryPlan, tuple[float, float]]:
        """The plan after the failure, with empty nodes for the failed ones; its seconds, processor's and clock's."""
        gone = {_node(node) for node in failed}
        placement = {rank: f"spare-of-{node}" if node in gone else node for rank, node in self.node_of.items()}
        copies = self.left(failed)
        start = time.process_time(), time.perf_counter()
        plan = plan_recovery(copies, self.world, placement=placement)
        return plan, (time.process_time() - start[0], time.perf_counter() - start[1])

    def choose(self, rng: random.Random, *, nodes: int = 0, domains: int = 0) -> tuple[int, ...]:
        """Nodes that fail together: some whole failure domains, and some single nodes out of the others."""
        racks = range(-(-self.nodes // self.nodes_per_domain))
        down = set(rng.sample(racks, domains))
        failed = [node for node in range(self.nodes) if node // self.nodes_per_domain in down]
        others = [node for node in range(self.nodes) if node // self.nodes_per_domain not in down]
        return tuple(failed + rng.sample(others, nodes))

    def trials(self, count: int, rng: random.Random, *, nodes: int = 0, domains: int = 0) -> list[Trial]:
        """Independent random failures, each recovered from in full."""
        made = []
        for _ in range(count):
            failed = self.choose(rng, nodes=nodes, domains=domains)
            plan, seconds = self.recover(failed)
            made.append(Trial(failed, plan.step >= 0, *seconds))
        return made


def _node(number: int) -> str:
    return f"node-{number:06d}"


def _record(rank: int, world: int, step: int) -> ShardRecord:
    return ShardRecord(
        job_id="simulated",
        group="default",
        incarnation=1,
        step=step,
        rank=rank,
        world_size=world,
        topology="",
        index_bytes=1000,
        index_digest="0" * 32,
        data_bytes=1 << 30,
        created_s=0.0,
    )
