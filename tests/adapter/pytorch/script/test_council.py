"""What the ranks say to each other in a script's calls, in a store that outlives a restart as torchrun's does."""

import datetime
import signal

import pytest
import torch.distributed as dist

from tests.adapter.pytorch.script.council_bodies import connections, host_gone, rounds, stream_sums, unconnected, waits
from tests.core.ranks import Life, memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def attempt():
    """Start the ranks; each start finds in the store what the ones before have left."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20))
    with memory_folder() as base:
        yield lambda body, *args, deadline_s=20, **wish: Life(
            body, 2, base / "base", *args, store=store, wish=wish, deadline_s=deadline_s
        )


def test_a_round_of_a_restarted_job_is_not_decided_by_what_a_dead_attempt_has_left(attempt):
    attempt(rounds, ["old", "old"], dies=True, deadline_s=2).results(killed=(1,))
    assert attempt(rounds, ["new", "newer"]).results() == {rank: [(True, "new"), (True, "newer")] for rank in (0, 1)}


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_to_the_first_call_waits_no_longer_for_those_who_have_gone_on(attempt, late):
    found = attempt(waits, late).results()
    assert [found[rank][0][0] for rank in (0, 1)] == [False, False]
    # Half of the deadline that it would else wait for.
    assert found[late][0][1] < 10
    assert [found[rank][1][0] for rank in (0, 1)] == [True, True]


def test_the_process_group_of_memory_saves_does_not_connect_to_a_dead_attempt(attempt):
    assert attempt(stream_sums).results() == {0: 3, 1: 3}
    assert attempt(stream_sums, late_s=1.0).results() == {0: 3, 1: 3}


def test_a_process_group_that_some_rank_does_not_connect_is_given_up_at_the_deadline(attempt):
    error, seconds = attempt(unconnected).results()[0]
    assert "connecting the process group" in error
    assert seconds < 3


def test_all_calls_of_a_script_share_one_connection_to_the_store(attempt):
    assert attempt(connections).results() == {0: 1, 1: 1}


def test_a_round_without_the_host_of_the_store_ends_at_once(attempt):
    assert max(attempt(host_gone, signal.SIGKILL).results(killed=(0,))[1]) < 2


def test_a_round_with_a_store_that_does_not_answer_ends_at_the_deadline_and_holds_up_no_later_one(attempt):
    waits = attempt(host_gone, signal.SIGSTOP, deadline_s=2).results()[1]
    assert max(waits) < 3
