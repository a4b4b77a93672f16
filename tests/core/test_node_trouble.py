"""What goes wrong between nodes: it is told, it stops no rank, and nothing incomplete ever looks complete."""

import os
import shutil
import subprocess

import pytest

from tests.core import bodies, node_bodies
from tests.core.ranks import Life, memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def nodes():
    """Base containers of two nodes."""
    with memory_folder() as folder:
        yield [folder / "node-0", folder / "node-1"]


def texts(results, level=""):
    return [line for result in results.values() for line in result["logs"] if line.startswith(level)]


def test_a_wrong_interface_on_one_rank_is_named_and_training_goes_on(nodes):
    wish = {"environ": {"GLOO_SOCKET_IFNAME": "nosuch0"}}
    results = Life(node_bodies.save_with, 2, None, 1, bases=nodes, wish=wish, deadline_s=6, busy_wait_s=0.2).results()
    # Rank 0's replica waits for rank 1 until its deadline, and both skip what comes meanwhile.
    assert results[0]["oks"] == results[1]["oks"]
    assert results[1]["oks"][:2] == [True, True]
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {-1}
    (warning,) = (line for line in texts(results, "WARNING") if "can't reach other nodes" in line)
    assert "GLOO_SOCKET_IFNAME='nosuch0'" in warning
    assert "remedy" in warning
    assert "nosuch0" in results[1]["stats"]["replica_last_error"]
    # What lies in memory can still be gone on from, as long as no node is lost.
    found = {r["found"] for r in Life(bodies.save_steps, 2, None, [], bases=nodes).results().values()}
    assert found in ({2}, {3})


def test_a_host_name_that_does_not_resolve_is_named_with_its_remedy(nodes):
    wish = {"host": "no-such-host.invalid"}
    results = Life(node_bodies.save_with, 2, None, 1, bases=nodes, wish=wish, deadline_s=6, busy_wait_s=0.2).results()
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {-1}
    (warning,) = (line for line in texts(results, "WARNING") if "can't reach other nodes" in line)
    assert "'no-such-host.invalid' does not resolve" in warning
    assert "set GLOO_SOCKET_IFNAME" in warning


def test_a_chosen_engine_that_is_not_installed_is_said_once_on_each_rank_and_saves_go_on(nodes):
    results = Life(node_bodies.save_without_the_engine, 2, None, bases=nodes, transport="mooncake").results()
    assert [result["oks"] for result in results.values()] == [[True] * 3] * 2
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {-1}
    said_by = [texts({rank: result}, "WARNING") for rank, result in results.items()]
    for rank in (0, 1):
        (said,) = (line for line in said_by[rank] if "can't reach other nodes" in line)
        assert "the Mooncake transfer engine can't be loaded" in said
        assert f"[MLFLASHPOINT_TRANSPORT, rank {rank}]" in said
        assert "remedy: pip install 'mlflashpoint[mooncake]'" in said
        assert "or set MLFLASHPOINT_TRANSPORT=gloo" in said
    assert found_after(nodes) == {3}


def test_ranks_that_choose_different_transports_are_all_told_so_and_saves_go_on(nodes):
    wish = {"settings": {"transport": "mooncake"}}
    results = Life(node_bodies.save_with, 2, None, 1, bases=nodes, wish=wish).results()
    assert [result["oks"] for result in results.values()] == [[True] * 3] * 2
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {-1}
    for rank, mine in enumerate(("gloo", "mooncake")):
        (said,) = (line for line in texts({rank: results[rank]}, "WARNING") if "can't reach other nodes" in line)
        assert f"rank 0 gloo, rank 1 mooncake [MLFLASHPOINT_TRANSPORT='{mine}'" in said
        assert "remedy: set it to the same value on all nodes" in said
    assert found_after(nodes) == {3}


def found_after(nodes):
    return {result["found"] for result in Life(bodies.save_steps, 2, None, [], bases=nodes).results().values()}


def test_a_label_that_one_node_lacks_is_an_error_and_replicas_go_to_another_node_all_the_same(nodes):
    wish = {"settings": {"failure_domain": "rack-7"}}
    results = Life(node_bodies.save_with, 2, None, 0, bases=nodes, wish=wish).results()
    (error,) = texts(results, "ERROR")
    assert "MLFLASHPOINT_FAILURE_DOMAIN" in error
    assert "1 of 2 nodes have no failure domain" in error
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {3}
    assert {result["stats"]["replicas"] for result in results.values()} == {1}


def test_more_replicas_than_domains_is_one_warning_and_as_many_as_there_can_be(nodes):
    results = Life(bodies.save_steps, 2, None, [1], bases=nodes, replicas=5).results()
    (warning,) = (line for line in texts(results, "WARNING") if "failure domain" in line)
    assert "1 replica of each shard, not the 5 asked for" in warning
    assert {result["stats"]["replicas_acknowledged"] for result in results.values()} == {1}


def test_a_whole_failure_domain_may_be_lost():
    with memory_folder() as folder:
        nodes = [folder / f"node-{number}" for number in range(4)]

        def life(steps):
            racks = {0: "a", 1: "a", 2: "b", 3: "b"}
            return Life(node_bodies.save_in_racks, 4, None, racks, steps, bases=nodes).results()

        assert {result["stats"]["last_complete_step"] for result in life([1, 2]).values()} == {2}
        shutil.rmtree(nodes[0])
        shutil.rmtree(nodes[1])
        assert {result["found"] for result in life([3]).values()} == {2}


def test_a_holder_that_is_slow_makes_all_ranks_skip_saves_and_the_lag_is_seen(nodes):
    results = Life(node_bodies.hold_slowly, 2, None, 1, 1.5, bases=nodes, busy_wait_s=0.3).results()
    for result in results.values():
        assert max(result["blocking"]) < 5
        assert result["final"]
        assert result["stats"]["last_complete_step"] == 100
        # All have committed step 1 by then, and one replica is not acknowledged.
        assert result["complete"][0] == -1
    # Only rank 0's replica is slow, and both skip for it.
    assert results[0]["skipped"] == results[1]["skipped"]
    assert results[0]["skipped"].count(True) == results[0]["stats"]["saves_skipped"] >= 2
    assert max(results[0]["lags"]) > 0.3
    assert any(results[0]["on_their_way"])


def test_a_source_that_hands_out_nothing_makes_all_ranks_take_what_they_can_have(nodes):
    Life(bodies.save_steps, 2, None, [1, 2], bases=nodes).results()
    shutil.rmtree(nodes[1])
    results = Life(node_bodies.find_while_one_hands_out_nothing, 2, None, 0, bases=nodes, deadline_s=9).results()
    assert {result["found"] for result in results.values()} == {-1}
    assert max(result["took"] for result in results.values()) < 20
    assert any("can't be had from other nodes" in line for line in results[1]["logs"])


def test_a_source_that_dies_during_recovery_is_named_to_all_within_the_deadline(nodes):
    Life(bodies.save_steps, 2, None, [1, 2], bases=nodes).results()
    shutil.rmtree(nodes[0])
    life = Life(node_bodies.find_while_one_dies, 2, None, 1, bases=nodes, deadline_s=6)
    result = life.results(killed=(1,))[0]
    assert "DeadlineExceededError: rank 1 did not answer" in result["error"]
    assert result["took"] < 20


def test_another_copy_is_taken_when_one_source_hands_out_nothing():
    with memory_folder() as folder:
        nodes = [folder / f"node-{number}" for number in range(3)]
        Life(bodies.save_steps, 3, None, [1, 2], bases=nodes, replicas=2).results()
        shutil.rmtree(nodes[2])
        stuck = {"bases": nodes, "replicas": 2, "deadline_s": 12}
        results = Life(node_bodies.find_while_one_hands_out_nothing, 3, None, 0, **stuck).results()
        assert {rank: result["value"] for rank, result in results.items()} == {0: 200.0, 1: 201.0, 2: 202.0}


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_rank_whose_new_node_has_no_room_loads_what_it_fetched_all_the_same(nodes):
    wish = {"numbers": 1_000_000}
    Life(node_bodies.resume_and_save, 2, None, [1, 2], bases=nodes, wish=wish).results()
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(nodes[1])], check=True)
    try:
        results = Life(node_bodies.resume_and_save, 2, None, [3], bases=nodes, wish=wish).results()
    finally:
        subprocess.run(["umount", str(nodes[1])], check=True)
    assert {result["found"] for result in results.values()} == {2}
    # It has no room for a save either, and training goes on.
    assert [result["oks"] for result in results.values()] == [[True], [False]]
    assert any("kept in the process's own memory" in line for line in results[1]["logs"])


def test_when_memory_fills_up_at_the_holder_the_version_does_not_count_and_the_error_says_where(nodes):
    """As on a node where somebody else has taken the memory that replicas need."""
    results = Life(node_bodies.refuse_replicas, 2, None, 1, bases=nodes).results()
    assert [result["oks"] for result in results.values()] == [[True] * 3] * 2
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {-1}
    (warning,) = (line for line in texts(results, "WARNING") if "a replica could not be delivered" in line)
    assert "rank 1 refused: no room for a replica of the shard of rank 0" in warning
    assert any("the memory version of step 1 is incomplete: rank 0: rank 1 refused" in line for line in texts(results))
