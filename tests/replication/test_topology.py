"""Who keeps whose replica, for any shape of cluster."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflashpoint.errors import SettingError
from mlflashpoint.replication.topology import RankPlacement, assign_replicas


def cluster(sizes_by_domain, first_rank=0):
    """Placements of domains -> list of ranks per node, ranks numbered in order."""
    placements, rank = [], first_rank
    for d, nodes in enumerate(sizes_by_domain):
        for n, size in enumerate(nodes):
            for _ in range(size):
                placements.append(RankPlacement(rank, f"node-{d}-{n}", f"rack-{d}"))
                rank += 1
    return placements


domains_of_nodes = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=2, max_size=7)


def domain_of(placements):
    return {p.rank: p.domain or p.node for p in placements}


@given(domains_of_nodes, st.integers(1, 4))
def test_every_replica_lies_in_a_domain_of_its_own(shape, k):
    placements = cluster(shape)
    result = assign_replicas(placements, k)
    domain = domain_of(placements)
    assert set(result.holders) == set(domain)
    for rank, holders in result.holders.items():
        assert len(holders) == min(k, len(shape) - 1) == result.replicas
        assert len({domain[rank], *(domain[h] for h in holders)}) == len(holders) + 1


@given(domains_of_nodes, st.integers(1, 4))
def test_load_is_within_one_shard_of_the_most_even_that_the_domains_allow(shape, k):
    placements = cluster(shape)
    result = assign_replicas(placements, k)
    load = Counter(holder for holders in result.holders.values() for holder in holders)
    by_domain = defaultdict(list)
    for placement in placements:
        by_domain[placement.domain].append(load[placement.rank])
    # No domain can keep more than one replica of each foreign shard. Water-filling under that bound is the most even.
    total, k = len(placements), result.replicas
    open_domains, left = dict(by_domain), k * total
    while full := [
        d for d, held in open_domains.items() if (total - len(held)) / len(held) < _level(open_domains, left)
    ]:
        for d in full:
            left -= total - len(open_domains.pop(d))
    level = _level(open_domains, left)
    for d, held in by_domain.items():
        best = level if d in open_domains else (total - len(held)) / len(held)
        assert all(abs(value - best) < 1 for value in held), (d, held, best)


def _level(open_domains, left):
    return left / sum(map(len, open_domains.values()))


@given(st.integers(2, 40), st.integers(1, 8), st.integers(1, 3))
def test_with_equal_nodes_every_rank_keeps_exactly_k(nodes, ranks_per_node, k):
    result = assign_replicas(cluster([[ranks_per_node]] * nodes), k)
    load = Counter(holder for holders in result.holders.values() for holder in holders)
    assert set(load.values()) == {min(k, nodes - 1)} and len(load) == nodes * ranks_per_node
    assert all(result.owners[rank] == tuple(sorted(result.owners[rank])) for rank in result.owners)
    assert Counter({rank: len(owned) for rank, owned in result.owners.items()}) == load


@given(domains_of_nodes, st.integers(1, 3), st.randoms(use_true_random=False))
def test_renumbering_the_nodes_moves_no_replica(shape, k, rng):
    placements = cluster(shape)
    nodes = sorted({p.node for p in placements})
    rng.shuffle(nodes)
    renumbered, rank, new_number = [], 0, {}
    for node in nodes:
        for p in (p for p in placements if p.node == node):
            new_number[p.rank] = rank
            renumbered.append(RankPlacement(rank, p.node, p.domain))
            rank += 1
    rng.shuffle(renumbered)
    before, after = assign_replicas(placements, k).holders, assign_replicas(renumbered, k).holders
    assert after == {new_number[owner]: tuple(new_number[h] for h in held) for owner, held in before.items()}


@given(domains_of_nodes, st.integers(1, 3))
def test_the_answer_does_not_depend_on_the_order_of_the_placements(shape, k):
    placements = cluster(shape)
    shuffled = random.Random(7).sample(placements, len(placements))
    assert assign_replicas(placements, k) == assign_replicas(shuffled, k)


@pytest.mark.parametrize(
    ("nodes", "k", "replicas", "warned"), [(1, 1, 0, 1), (2, 1, 1, 0), (2, 2, 1, 1), (3, 2, 2, 0), (3, 9, 2, 1)]
)
def test_fewer_domains_than_k_plus_1_give_as_many_as_there_are_and_say_so_once(nodes, k, replicas, warned):
    result = assign_replicas(cluster([[2]] * nodes), k)
    assert result.replicas == replicas and len(result.warnings) == warned
    assert {len(held) for held in result.holders.values()} == {replicas}


def test_nodes_without_labels_are_domains_of_their_own():
    placements = [RankPlacement(rank, f"host-{rank // 2}") for rank in range(6)]
    result = assign_replicas(placements, 1)
    assert result.holders == {0: (2,), 1: (3,), 2: (4,), 3: (5,), 4: (0,), 5: (1,)} and not result.warnings


def test_one_label_for_several_nodes_still_survives_the_loss_of_a_node():
    placements = [RankPlacement(rank, f"host-{rank}", "rack-a") for rank in range(3)]
    result = assign_replicas(placements, 1)
    assert result.holders == {0: (1,), 1: (2,), 2: (0,)}
    assert len(result.warnings) == 1 and "rack-a" in result.warnings[0]


def test_a_large_rack_keeps_one_of_every_foreign_shard_and_spreads_its_own():
    result = assign_replicas(cluster([[4, 4], [2]]), 1)
    assert sorted(len(result.owners[rank]) for rank in range(8)) == [0] * 6 + [1] * 2
    assert [len(result.owners[rank]) for rank in (8, 9)] == [4, 4]


def test_no_replicas_and_no_ranks_are_no_error():
    assert assign_replicas([], 2).holders == {}
    assert assign_replicas(cluster([[1], [1]]), 0).holders == {0: (), 1: ()}


@pytest.mark.parametrize(
    ("placements", "k", "named"),
    [
        (
            [RankPlacement(0, "a", "rack-1"), RankPlacement(1, "b", None)],
            1,
            ["'b'", "FAILURE_DOMAIN", "rank 1"],
        ),
        ([RankPlacement(0, "a", "rack-1"), RankPlacement(1, "b", "")], 1, ["'b'", "on every node or on none"]),
        ([RankPlacement(0, "a", "x"), RankPlacement(1, "a", "y")], 1, ["'a'", "'x'", "'y'", "rank 1"]),
        ([RankPlacement(0, "a"), RankPlacement(0, "b")], 1, ["placed twice"]),
        ([RankPlacement(0, "a")], -1, ["MLFLASHPOINT_REPLICAS", "-1"]),
    ],
)
def test_impossible_input_is_an_error_that_names_it(placements, k, named):
    with pytest.raises(SettingError) as caught:
        assign_replicas(placements, k)
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_eighty_thousand_ranks_each_keep_k_replicas_from_other_domains():
    placements = cluster([[8] * 4] * 2500)
    domain = domain_of(placements)
    result = assign_replicas(placements, 2)
    assert {len(owners) for owners in result.owners.values()} == {2} and len(result.owners) == 80000
    assert all(len({domain[rank], *map(domain.get, held)}) == 3 for rank, held in result.holders.items())
