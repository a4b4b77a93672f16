"""Real processes, really killed: what is in memory afterwards is always one whole version."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core import bodies
from tests.core.ranks import Life, memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


@pytest.mark.parametrize("phase", bodies.PHASES)
def test_a_rank_killed_in_any_phase_of_a_save_leaves_one_whole_version(base, phase):
    first = Life(bodies.die_in_save, 2, base, phase, 1)
    assert first.results(killed=(1,)) == {0: True}
    second = Life(bodies.save_steps, 2, base, [10, 11]).results()
    committed = phase in ("after the commit record", "after the announcement")
    assert {rank: result["found"] for rank, result in second.items()} == dict.fromkeys((0, 1), 3 if committed else 2)
    assert all(result["saved"] == [True, True] for result in second.values())
    assert not list(base.rglob("*.tmp-*"))
    third = Life(bodies.save_steps, 2, base, []).results()
    assert third[0]["found"] == third[1]["found"] == 11


def test_a_job_killed_at_any_moment_ten_times_loses_at_most_the_saves_under_way(base):
    newest = -1
    for life in range(10):
        job = Life(bodies.save_until_killed, 2, base, busy_wait_s=20)
        try:
            found = {int(job.store.get(f"found/{rank}")) for rank in range(2)}
            assert found == {max(newest, *found)}
            while job.store.add("done", 0) < 8:
                time.sleep(0.001)
            time.sleep(0.003 * life)
        finally:
            job.kill()
        # Two slots: one save is under way while the one before it is whole, or becomes so.
        newest = found.pop() + job.store.add("done", 0) // 2 - 2


def test_save_resume_save_resume(base):
    for life, expected in enumerate((-1, 2, 4, 6)):
        results = Life(bodies.save_steps, 2, base, [2 * life + 1, 2 * life + 2]).results()
        assert {result["found"] for result in results.values()} == {expected}
        assert {result["stats"]["last_complete_step"] for result in results.values()} == {2 * life + 2}


def test_sigterm_during_a_save_leaves_what_was_whole(base):
    Life(bodies.save_steps, 1, base, [1, 2]).results()
    life = Life(bodies.commit_slowly, 1, base, 0, 0.5)
    deadline = time.monotonic() + 30
    while not list(base.rglob("*.commit")) or len(list(base.rglob("*.commit"))) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process = life.processes[0]
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == -signal.SIGTERM
    assert Life(bodies.save_steps, 1, base, []).results()[0]["found"] >= 1


LAST_SAVE = """
import sys, time
from mlflashpoint.core import saver
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import state

commit = saver.ShardSaver.commit
saver.ShardSaver.commit = lambda *args, **fields: (time.sleep(0.5), commit(*args, **fields))[1]
runtime = Runtime(StoreConfig(job_id="job", base_container=sys.argv[1]), rank=0, world_size=1, local_rank=0)
assert runtime.save(state(7, 0), step=7).ok
"""


def test_a_process_that_ends_right_after_a_save_still_commits_it(base):
    subprocess.run([sys.executable, "-c", LAST_SAVE, str(base)], check=True, timeout=60, cwd=Path(__file__).parents[2])
    assert Life(bodies.save_steps, 1, base, []).results()[0]["found"] == 7


def test_after_a_rollback_the_stale_newer_version_never_wins_even_if_nothing_was_saved_since(base):
    Life(bodies.save_steps, 2, base, [20, 40]).results()
    assert Life(bodies.save_steps, 2, base, [], 20).results()[0]["found"] == 40
    for _ in range(2):
        third = Life(bodies.save_steps, 2, base, []).results()
        assert {result["found"] for result in third.values()} == {20}


def test_a_left_over_of_an_earlier_start_on_one_node_only_never_wins(base):
    nodes = [base.with_name("node-a"), base.with_name("node-b")]
    Life(bodies.save_steps, 2, None, [20, 40], bases=nodes, replicas=0).results()
    # The job goes back to 20 while node b is replaced by a new one, and dies before it saves anything.
    first = Life(bodies.save_steps, 2, None, [], 20, bases=[nodes[0], base.with_name("node-c")], replicas=0).results()
    assert first[0]["found"] == -1
    # Now node b is back, and a whole version 40 could be put together.
    found = Life(bodies.save_steps, 2, None, [], bases=nodes).results()
    assert {result["found"] for result in found.values()} == {20}


def test_two_starts_that_could_not_know_of_each_other_never_mix(base):
    nodes = {name: base.with_name(f"node-{name}") for name in "abcd"}
    Life(bodies.save_steps, 2, None, [5], bases=[nodes["a"], nodes["b"]], replicas=0).results()
    Life(bodies.save_steps, 2, None, [5], bases=[nodes["c"], nodes["d"]], replicas=0).results()
    mixed = Life(bodies.save_steps, 2, None, [], bases=[nodes["a"], nodes["d"]], replicas=0).results()
    assert {result["found"] for result in mixed.values()} == {-1}


def test_ranks_permuted_across_the_seats_of_a_node_get_their_own_shards(base):
    Life(bodies.save_steps, 3, base, [1, 2]).results()
    second = Life(bodies.save_steps, 3, base, [3], seats=[1, 2, 0]).results()
    assert {result["found"] for result in second.values()} == {2}
    third = Life(bodies.save_steps, 3, base, [], seats=[0, 2, 1]).results()
    assert {result["found"] for result in third.values()} == {3}


def test_two_nodes_with_file_systems_of_their_own_both_load(base):
    nodes = [base.with_name("node-a"), base.with_name("node-b")]
    Life(bodies.save_steps, 2, None, [1, 2], bases=nodes).results()
    assert {r["found"] for r in Life(bodies.save_steps, 2, None, [], bases=nodes).results().values()} == {2}


def test_without_replicas_a_lost_node_means_nothing_is_found(base):
    nodes = [base.with_name("node-a"), base.with_name("node-b")]
    Life(bodies.save_steps, 2, None, [1, 2], bases=nodes, replicas=0).results()
    lost = Life(bodies.find_only, 2, None, bases=[nodes[0], base.with_name("new")], replicas=0).results()
    assert {result["step"] for result in lost.values()} == {None}
    assert any("no copy of the shards of rank 1" in line for line in lost[0]["logs"])
