"""Memory, times and intervals of a job, against the formulas worked by hand and against simulation."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from mlflashpoint.core import arena
from mlflashpoint.planning.sizing import SLOT_GRAIN, Job, daly_interval, size_up

GIB = 1 << 30
JOB = Job(
    nodes=64,
    ranks_per_node=8,
    bytes_per_rank=10 * GIB,
    tmpfs_bytes=400 * GIB,
    replicas=1,
    node_mtbf_s=10_000 * 3600,
    step_s=10.0,
    bandwidth=20e9,
    blocking_s=1.0,
)


def plan(**changes):
    return size_up(dataclasses.replace(JOB, **changes), failures=3)


def test_memory_counts_every_slot_of_own_shards_and_replicas():
    assert plan().memory_bytes == (2 + 3) * 8 * 10 * GIB and plan().fits
    assert plan(replicas=2).memory_bytes == (2 + 2 * 3) * 8 * 10 * GIB and not plan(replicas=2).fits
    assert plan(keep_versions=3).memory_bytes == (3 + 4) * 8 * 10 * GIB
    # one version cannot be kept in less than two slots: one protected, one to write
    assert plan(keep_versions=1).memory_bytes == plan(keep_versions=2).memory_bytes
    assert plan(bytes_per_rank=1).memory_bytes == (2 + 3) * 8 * SLOT_GRAIN


def test_slots_are_rounded_as_the_store_rounds_them():
    assert SLOT_GRAIN == arena._GRAIN


def test_replication_is_timed_for_the_busiest_node():
    assert math.isclose(plan().replication_s, 8 * 10 * GIB / 20e9)
    # two racks of unequal size: the nodes of the small one take in the shards of all others
    lopsided = plan(nodes=6, nodes_per_domain=4)
    assert math.isclose(lopsided.replication_s, 2 * 8 * 10 * GIB / 20e9)
    assert lopsided.memory_bytes == 10 * GIB * (2 * 8 + 3 * 16)
    assert plan(replicas=0).replication_s == 0


def test_the_recommended_interval_is_dalys_in_whole_steps():
    sizing = plan()
    assert math.isclose(sizing.job_mtbf_s, 10_000 * 3600 / 64)
    assert math.isclose(sizing.daly_s, daly_interval(1.0, sizing.job_mtbf_s))
    assert sizing.recommended_steps == round(sizing.daly_s / 10.0) == sizing.interval_steps


def test_dalys_formula_has_its_published_limits():
    # first order: Young's sqrt(2 d M) for short saves; M itself for saves as long as the failures are apart
    assert math.isclose(daly_interval(1e-6, 1e6), math.sqrt(2.0), rel_tol=1e-4)
    assert daly_interval(100.0, 50.0) == 50.0
    assert math.isclose(daly_interval(2.0, 100.0), 20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)


def test_the_recommended_interval_loses_least_in_a_simulated_run():
    save, mtbf = 5.0, 2000.0
    best = daly_interval(save, mtbf)

    def waste(interval):
        rng = random.Random(11)
        done = clock = 0.0
        failure = rng.expovariate(1 / mtbf)
        while done < 400_000:
            end = clock + interval + save
            if end < failure:
                clock, done = end, done + interval
            else:
                clock = failure
                failure = clock + rng.expovariate(1 / mtbf)
        return clock / done

    assert waste(best) < min(waste(best / 3), waste(best * 3))


def test_saves_never_come_faster_than_replication():
    sizing = plan(bandwidth=1e9)
    assert sizing.recommended_steps * 10 + 1 >= sizing.replication_s and not sizing.warnings
    tight = plan(bandwidth=1e9, save_every_n_steps=2)
    assert tight.interval_steps == 2 and any("saves will be skipped" in w for w in tight.warnings)


def test_expected_loss_agrees_with_failures_at_random_moments():
    sizing = plan(save_every_n_steps=30)
    interval, usable_after = sizing.interval_s, JOB.blocking_s + sizing.replication_s
    rng = random.Random(2)

    def lost(moment):
        # the newest version that was usable then, and how long ago its save began
        newest = math.floor((moment - usable_after) / interval)
        return moment - newest * interval

    seen = sum(lost(rng.uniform(100 * interval, 200 * interval)) for _ in range(20_000)) / 20_000
    assert math.isclose(sizing.lost_s, seen, rel_tol=0.02)


def test_odds_are_given_for_nodes_and_for_domains():
    sizing = plan(nodes_per_domain=8)
    assert [sizing.node_loss[f].probability > 0 for f in (1, 2, 3)] == [False, True, True]
    assert [sizing.domain_loss[f].probability > 0 for f in (1, 2, 3)] == [False, True, True]
    assert not plan().domain_loss


def test_too_few_domains_and_too_little_memory_are_warned_of():
    sizing = plan(nodes=2, replicas=3, tmpfs_bytes=GIB)
    assert sizing.replicas == 1 and not sizing.fits and len(sizing.warnings) == 2
    assert any("loses everything" in warning for warning in plan(nodes=1).warnings)
    durable = plan(nodes=1, durable_every_n_steps=100)
    assert durable.lost_to_durable_s == 500 and not any("loses everything" in w for w in durable.warnings)


@pytest.mark.parametrize("field", ["nodes", "ranks_per_node", "bytes_per_rank", "tmpfs_bytes", "bandwidth", "step_s"])
def test_impossible_numbers_are_refused_by_name(field):
    with pytest.raises(ValueError, match=field):
        plan(**{field: 0})
