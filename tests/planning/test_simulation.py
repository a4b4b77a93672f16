"""Simulated failures are recovered from exactly when the formula's sets say so."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc

import pytest

from mlflashpoint.planning.simulation import NEWEST_STEP, Cluster
from mlflashpoint.planning.survival import Survival


@pytest.mark.parametrize(
    ("replicas", "per_domain", "nodes", "domains"),
    [(1, 1, 4, 0), (2, 1, 6, 0), (1, 4, 2, 1), (2, 4, 0, 3), (0, 1, 1, 0)],
)
def test_the_real_plan_recovers_if_and_only_if_no_fatal_set_failed(replicas, per_domain, nodes, domains):
    cluster = Cluster(40, 2, replicas=replicas, nodes_per_domain=per_domain)
    survival = Survival(cluster.holders, cluster.node_of)
    trials = cluster.trials(150, random.Random(5), nodes=nodes, domains=domains)
    assert all(trial.recovered != survival.lost(trial.failed) for trial in trials)


def test_the_share_of_failures_recovered_from_matches_the_formula():
    cluster = Cluster(64, 1, replicas=1, versions=1)
    expected = 1 - Survival(cluster.holders, cluster.node_of).loss(8).probability
    trials = cluster.trials(1500, random.Random(7), nodes=8)
    recovered = sum(trial.recovered for trial in trials) / len(trials)
    assert 0.2 < expected < 0.8
    assert abs(recovered - expected) < 4 * math.sqrt(expected * (1 - expected) / len(trials))


def test_after_the_loss_of_a_whole_domain_every_shard_has_a_source_on_a_node_that_is_left():
    cluster = Cluster(24, 3, replicas=1, nodes_per_domain=4)
    failed = cluster.choose(random.Random(1), domains=1)
    plan, _ = cluster.recover(failed)
    gone = {f"node-{node:06d}" for node in failed}
    assert plan.step == NEWEST_STEP and set(plan.sources) == set(range(cluster.world))
    assert all(copy.node not in gone for sources in plan.sources.values() for copy in sources)
    assert len(failed) == 4 and all(len(sources) >= 1 for sources in plan.sources.values())


def test_ten_thousand_nodes_of_eight_ranks_recover_as_often_as_the_formula_says():
    cluster = Cluster(10_000, 8, replicas=1, versions=1)
    survival = Survival(cluster.holders, cluster.node_of)
    rng = random.Random(3)
    planned = cluster.trials(2, rng, nodes=100)
    assert all(trial.recovered != survival.lost(trial.failed) for trial in planned)
    plan, _ = cluster.recover([3, 7000, 7010])
    assert plan.step == NEWEST_STEP and len(plan.sources) == 80_000
    # Those planned agree with the sets of nodes that hold all copies of a shard; many more are looked up there alone.
    count = 1000
    recovered = 1 - sum(survival.lost(cluster.choose(rng, nodes=100)) for _ in range(count)) / count
    expected = 1 - survival.loss(100).probability
    assert 0.2 < expected < 0.8
    assert abs(recovered - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def plan_memory(nodes):
    """Most bytes that a plan needs beside the copies it is made from."""
    cluster = Cluster(nodes, 8, replicas=1)
    gc.collect()
    tracemalloc.start()
    try:
        cluster.recover([0])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_of_a_plan_grows_with_the_cluster_and_no_faster():
    assert 3 < plan_memory(4_000) / plan_memory(1_000) < 5
