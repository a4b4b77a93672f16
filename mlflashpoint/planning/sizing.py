"""Sizes and intervals of a job from a few numbers about it. Pure arithmetic; docs/planning.md derives the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mlflashpoint.core.rotation import slots_needed
from mlflashpoint.planning.survival import Loss, Survival
from mlflashpoint.replication.topology import RankPlacement, ReplicaMap, assign_replicas

#: slots are whole huge pages
SLOT_GRAIN = 2 << 20


@dataclass(frozen=True)
class Job:
    """What is known of a job before it starts.

    Attributes:
        nodes, ranks_per_node: its shape.
        bytes_per_rank: size of one rank's shard.
        tmpfs_bytes: memory that the store may use on each node.
        replicas: copies asked for on other failure domains.
        node_mtbf_s: mean time between failures of one node, in seconds.
        step_s: seconds that one training step takes.
        bandwidth: bytes per second that one node sends, and receives, for replication.
        blocking_s: seconds that one save holds up training.
        keep_versions: as the setting.
        nodes_per_domain: nodes that share a failure domain.
        restart_s: seconds from a failure until training steps run again.
        save_every_n_steps: the interval to judge; None takes the recommended one.
        durable_every_n_steps: interval of durable checkpoints, if any.
    """

    nodes: int
    ranks_per_node: int
    bytes_per_rank: float
    tmpfs_bytes: float
    replicas: int
    node_mtbf_s: float
    step_s: float
    bandwidth: float
    blocking_s: float
    keep_versions: int = 2
    nodes_per_domain: int = 1
    restart_s: float = 0.0
    save_every_n_steps: int | None = None
    durable_every_n_steps: int | None = None

    def placements(self) -> Iterable[RankPlacement]:
        labels = None if self.nodes_per_domain == 1 else self.nodes_per_domain
        for rank in range(self.nodes * self.ranks_per_node):
            node = rank // self.ranks_per_node
            yield RankPlacement(rank, f"node-{node:07d}", None if labels is None else f"domain-{node // labels:07d}")


@dataclass(frozen=True)
class Sizing:
    """What to expect of the job; times in seconds, sizes in bytes, per node where not said otherwise.

    Attributes:
        replicas: copies that there will be: fewer than asked for if there are too few domains.
        memory_bytes: memory that the store takes on the node that takes most.
        fits: whether that is within ``tmpfs_bytes``.
        replication_s: time until one version's replicas have been sent.
        job_mtbf_s: mean time between failures of any node.
        daly_s: training time between saves that Daly's formula recommends.
        recommended_steps: the same in steps, and not less than replication needs.
        interval_steps: the interval that the rest is computed for.
        interval_s: time from one save to the next, the save included.
        lost_s: work lost on average by a failure after which memory recovery works.
        lost_to_durable_s: the same when it does not, None without durable checkpoints.
        overhead: share of the time that goes into saves, lost work and restarts.
        node_loss, domain_loss: number of nodes (failure domains) that fail together -> odds of losing memory recovery.
        warnings: one line for each thing to look at.
    """

    replicas: int
    memory_bytes: float
    fits: bool
    replication_s: float
    job_mtbf_s: float
    daly_s: float
    recommended_steps: int
    interval_steps: int
    interval_s: float
    lost_s: float
    lost_to_durable_s: float | None
    overhead: float
    node_loss: dict[int, Loss]
    domain_loss: dict[int, Loss]
    warnings: tuple[str, ...]


def daly_interval(blocking_s: float, mtbf_s: float) -> float:
    """Training time between saves that loses least: Daly 2006, equation 37.

    Args:
        blocking_s: time of one save.
        mtbf_s: mean time between failures of the job.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocking_s / (2 * mtbf_s)
    return math.sqrt(2 * blocking_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking_s


def size_up(job: Job, *, failures: int) -> Sizing:
    """Everything about ``job``; odds for 1 to ``failures`` nodes that fail together.

    Raises:
        ValueError: a number is impossible; names it.
    """
    _check(job)
    placements = list(job.placements())
    replica_map = assign_replicas(placements, job.replicas)
    replicas = replica_map.replicas
    warnings = list(replica_map.warnings)

    most_kept = _most_kept_on_a_node(replica_map, job)
    slot = math.ceil(job.bytes_per_rank / SLOT_GRAIN) * SLOT_GRAIN
    slots = slots_needed(job.keep_versions)
    # A restart that gives ranks other nodes has to keep an owner's replicas beside those of the one before.
    memory = slot * (slots * job.ranks_per_node + (slots + 1) * most_kept)
    if memory > job.tmpfs_bytes:
        warnings.append("the store does not fit: keep fewer versions or replicas, or give tmpfs more memory")

    replication = job.bytes_per_rank * max(job.ranks_per_node * replicas, most_kept) / job.bandwidth
    job_mtbf = job.node_mtbf_s / job.nodes
    daly = daly_interval(job.blocking_s, job_mtbf)
    recommended = max(1, round(daly / job.step_s), math.ceil((replication - job.blocking_s) / job.step_s))
    steps = job.save_every_n_steps or recommended
    interval = steps * job.step_s + job.blocking_s
    if replication > interval:
        warnings.append("replication takes longer than the interval: saves will be skipped until it is done")

    lost = interval / 2 + job.blocking_s + replication
    durable = None if job.durable_every_n_steps is None else job.durable_every_n_steps * job.step_s / 2
    node_loss, domain_loss = _odds(job, placements, replica_map, failures)
    typical = node_loss[1].probability
    if typical and durable is None:
        warnings.append("the loss of one node loses everything: there is no replica and no durable checkpoint")
    per_failure = lost * (1 - typical) + (durable if durable is not None else lost) * typical
    return Sizing(
        replicas=replicas,
        memory_bytes=memory,
        fits=memory <= job.tmpfs_bytes,
        replication_s=replication,
        job_mtbf_s=job_mtbf,
        daly_s=daly,
        recommended_steps=recommended,
        interval_steps=steps,
        interval_s=interval,
        lost_s=lost,
        lost_to_durable_s=durable,
        overhead=job.blocking_s / interval + (per_failure + job.restart_s) / job_mtbf,
        node_loss=node_loss,
        domain_loss=domain_loss,
        warnings=tuple(warnings),
    )


def _check(job: Job) -> None:
    for name in ("nodes", "ranks_per_node", "keep_versions", "nodes_per_domain"):
        if getattr(job, name) < 1:
            raise ValueError(f"{name} must be 1 or more")
    for name in ("bytes_per_rank", "tmpfs_bytes", "node_mtbf_s", "step_s", "bandwidth"):
        if not 0 < getattr(job, name) < math.inf:
            raise ValueError(f"{name} must be above 0")
    if job.replicas < 0 or job.blocking_s < 0 or job.restart_s < 0:
        raise ValueError("replicas, blocking and restart times can't be negative")
    if job.nodes * job.ranks_per_node > 4_000_000:
        raise ValueError("more than 4,000,000 ranks are not planned for")


def _most_kept_on_a_node(replica_map: ReplicaMap, job: Job) -> int:
    kept = [0] * job.nodes
    for holder, owners in replica_map.owners.items():
        kept[holder // job.ranks_per_node] += len(owners)
    return max(kept)


def _odds(
    job: Job, placements: list[RankPlacement], replica_map: ReplicaMap, failures: int
) -> tuple[dict[int, Loss], dict[int, Loss]]:
    node_of = {placement.rank: placement.node for placement in placements}
    survival = Survival(replica_map.holders, node_of)
    nodes = {f: survival.loss(f) for f in range(1, min(failures, survival.places) + 1)}
    if job.nodes_per_domain == 1:
        return nodes, {}
    domain_of = {placement.rank: placement.domain or placement.node for placement in placements}
    survival = Survival(replica_map.holders, domain_of)
    return nodes, {f: survival.loss(f) for f in range(1, min(failures, survival.places) + 1)}
