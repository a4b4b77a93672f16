"""The odds of losing memory recovery are exact."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.planning.survival import Survival
from mlflashpoint.replication.topology import RankPlacement, assign_replicas


def survival(sizes, k, nodes_per_domain=1):
    """Of nodes with these numbers of ranks."""
    placements, rank = [], 0
    for node, size in enumerate(sizes):
        for _ in range(size):
            placements.append(RankPlacement(rank, f"node-{node:03d}", f"domain-{node // nodes_per_domain:03d}"))
            rank += 1
    held = assign_replicas(placements, k).holders
    return Survival(held, {p.rank: p.node for p in placements}), held, {p.rank: p.node for p in placements}


def lost_by_brute_force(held, node_of, failures):
    nodes = sorted(set(node_of.values()))
    choices = list(itertools.combinations(nodes, failures))
    lost = sum(
        any({node_of[rank], *(node_of[h] for h in holders)} <= set(choice) for rank, holders in held.items())
        for choice in choices
    )
    return lost / len(choices)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.data())
def test_the_formula_counts_what_enumeration_counts_for_equal_nodes(nodes, ranks, k, per_domain, data):
    odds, held, node_of = survival([ranks] * nodes, k, per_domain)
    failures = data.draw(st.integers(0, nodes))
    loss = odds.loss(failures)
    assert loss.standard_error == 0
    assert math.isclose(loss.probability, lost_by_brute_force(held, node_of, failures), abs_tol=1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 3), st.data())
def test_the_count_is_exact_for_nodes_of_unequal_size(sizes, k, data):
    odds, held, node_of = survival(sizes, k)
    failures = data.draw(st.integers(0, len(sizes)))
    loss = odds.loss(failures)
    assert loss.standard_error == 0
    assert math.isclose(loss.probability, lost_by_brute_force(held, node_of, failures), abs_tol=1e-12)


def test_one_replica_on_a_ring_has_the_textbook_odds():
    odds, _, _ = survival([2] * 10, 1)
    assert math.isclose(odds.loss(2).probability, 10 / math.comb(10, 2))
    assert math.isclose(odds.loss(3).probability, 1 - 10 / 7 * math.comb(7, 3) / math.comb(10, 3))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_any_k_nodes_may_fail(k):
    odds, _, _ = survival([4] * 50, k)
    assert all(odds.loss(failures).probability == 0 for failures in range(k + 1))
    assert odds.loss(k + 1).probability > 0 and odds.loss(50).probability == 1


def test_without_replicas_any_failure_loses():
    odds, _, _ = survival([2] * 5, 0)
    assert odds.loss(0).probability == 0 and odds.loss(1).probability == 1


def test_the_odds_at_ten_thousand_nodes_agree_with_random_failures():
    odds, _, _ = survival([1] * 10_000, 1)
    exact = odds.loss(100).probability
    rng = random.Random(3)
    trials = 2000
    seen = sum(odds.lost(rng.sample(range(10_000), 100)) for _ in range(trials)) / trials
    assert abs(seen - exact) < 4 * math.sqrt(exact * (1 - exact) / trials)


def test_what_is_too_tangled_to_count_is_estimated_and_says_so():
    # nodes of two sizes: the shift splits the shards of a node over two others, and no cycle is left
    odds, _, _ = survival([2, 3] * 12, 1)
    loss = odds.loss(4)
    assert loss.standard_error > 0
    exact = sum(odds.lost(choice) for choice in itertools.combinations(range(24), 4)) / math.comb(24, 4)
    assert abs(loss.probability - exact) < 5 * loss.standard_error


def test_impossible_numbers_of_failures_are_refused():
    odds, _, _ = survival([1] * 3, 1)
    for failures in (-1, 4):
        with pytest.raises(ValueError, match=str(failures)):
            odds.loss(failures)
