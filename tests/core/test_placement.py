"""Who keeps whose replica, as the ranks are told when they join."""

import logging

import pytest

from mlflashpoint.core.member import Member
from mlflashpoint.core.placement import Placement, place
from mlflashpoint.errors import PeerError


def members(*nodes, domains=None, hosts=None, problems=()):
    return [
        Member(
            rank=rank,
            seat=0,
            node=node,
            domain=domains[rank] if domains else "",
            seen=0,
            job_id="j",
            problem="no memory" if rank in problems else None,
            host=hosts[rank] if hosts else "",
        )
        for rank, node in enumerate(nodes)
    ]


@pytest.fixture(autouse=True)
def logs(caplog):
    caplog.set_level(logging.INFO, "mlflashpoint")
    return caplog


def test_ranks_on_one_node_are_not_linked_and_that_is_one_info_line(logs):
    assert place(members("a", "a"), 1) == {0: Placement(), 1: Placement()}
    assert [(record.levelname, "one node" in record.message) for record in logs.records] == [("INFO", True)]


def test_no_replicas_wanted_is_no_link_and_no_word(logs):
    assert place(members("a", "b"), 0) == {0: Placement(), 1: Placement()}
    assert not logs.records


def test_each_rank_knows_its_holders_their_nodes_and_whose_replicas_it_keeps():
    found = place(members("a", "b", "c"), 1)
    assert all(part.linked for part in found.values())
    for rank, part in found.items():
        (holder,) = part.holders
        assert holder != rank
        assert found[holder].owners == (rank,)
        assert part.nodes == {holder: "abc"[holder]}


def test_nodes_of_one_host_name_are_different_domains():
    found = place(members("a", "b", hosts=["localhost", "localhost"]), 1)
    assert [found[rank].holders for rank in (0, 1)] == [(1,), (0,)]


def test_a_rank_without_a_memory_store_keeps_nothing_and_the_others_replicate():
    found = place(members("a", "b", "", problems=[2]), 1)
    assert found[2] == Placement(storeless=found[2].storeless)
    assert [found[rank].holders for rank in (0, 1)] == [(1,), (0,)]


@pytest.mark.parametrize("nodes", ["aab", "abc"])
def test_every_rank_is_told_which_ones_have_no_memory_store(nodes):
    found = place(members(*nodes, problems=[1, 2]), 1)
    assert {part.storeless for part in found.values()} == {"ranks 1, 2 have no memory store: no memory"}
    assert {Placement.from_json(part.to_json()) == part for part in found.values()} == {True}


def test_replicas_leave_the_rack():
    found = place(members("a", "b", "c", "d", domains=["x", "x", "y", "y"]), 1)
    assert all((rank < 2) != (holder < 2) for rank, part in found.items() for holder in part.holders)


def test_a_label_that_is_missing_on_one_node_names_its_host_and_the_setting(logs):
    found = place(members("a", "b", domains=["rack", ""], hosts=["gpu-1", "gpu-2"]), 1)
    assert [found[rank].holders for rank in (0, 1)] == [(1,), (0,)]
    (error,) = (record.message for record in logs.records if record.levelname == "ERROR")
    assert "gpu-2/b" in error
    assert "MLFLASHPOINT_FAILURE_DOMAIN" in error


def test_a_placement_goes_through_json():
    for part in place(members("a", "b", "c"), 2).values():
        assert Placement.from_json(part.to_json()) == part


@pytest.mark.parametrize("raw", [None, [], {}, {"linked": True, "holders": [1], "owners": []}])
def test_a_malformed_placement_is_an_error_and_no_crash(raw):
    with pytest.raises(PeerError, match="malformed"):
        Placement.from_json(raw)
