"""Training goes back to an older version within the process, and saves a step again; on two real ranks."""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess
OLD, NEW = ["step-10_ckpt", 10, [10.0]], ["step-10_ckpt", 77, [77.0]]


@pytest.fixture(scope="module")
def job(warm, tmp_path_factory):
    """``(base container's folder, report of each rank)``."""
    folder, worker = tmp_path_factory.mktemp("back"), Path(__file__).with_name("back_worker.py")
    with memory_folder() as base:
        yield base, launch.fork(warm.zygote(False), worker, 2, [base], folder / "ranks")


def refused(results, *texts, newest=OLD):
    """The save is the same named error on all ranks, with the remedy, and nothing of it is in memory."""
    for result in results:
        assert result["newest"] == newest
        assert result["failures"]
        for kind, text in result["failures"].values():
            assert kind == "StepError"
            for word in ("step 10 was saved already", "resumed(step)", "save under another step", *texts):
                assert word in text, text


@pytest.mark.parametrize(
    "scenario",
    [
        "all_ranks_go_back",
        "all_ranks_go_back_with_dcps_planner",
        "all_ranks_go_back_beside_a_checkpoint_process",
    ],
)
def test_a_step_that_is_saved_again_after_all_ranks_went_back_holds_the_new_state(said, scenario):
    assert said(scenario) == [{"failures": {}, "newest": NEW}] * 2


def test_an_async_save_of_a_step_after_all_ranks_went_back_holds_the_new_state(said):
    assert said("an_async_save_after_going_back") == [NEW] * 2


@pytest.mark.parametrize(
    "scenario",
    [
        "nothing_is_loaded",
        "all_ranks_look_and_load_the_newest_again",
        "all_ranks_look_with_a_reader_that_is_not_the_jobs",
    ],
)
def test_a_step_that_is_saved_again_without_going_back_is_not_stored_again(said, scenario):
    assert said(scenario) == [{"failures": {}, "newest": OLD}] * 2


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("one_rank_alone_loads", "rank 0: nothing, rank 1: step 5"),
        ("each_rank_loads_another_version", "rank 0: step 3, rank 1: step 5"),
        ("all_ranks_look_at_a_part", "parts of older versions"),
        ("a_planner_that_drops_the_marks", "step 5"),
        ("one_rank_alone_loads_beside_a_checkpoint_process", "rank 0: nothing, rank 1: step 5"),
    ],
)
def test_a_step_that_is_saved_again_where_the_ranks_may_not_all_go_back_is_refused_on_all(said, scenario, text):
    refused(said(scenario), text)


def test_a_rank_that_alone_calls_resumed_before_all_load_is_told_on_all(said):
    # What one rank has given up no longer counts.
    results = said("one_rank_alone_calls_resumed")
    refused(results, "rank 0: step 5, rank 1: nothing", newest=["step-5_ckpt", 5, [5.0]])


def test_a_rank_that_alone_loads_an_older_version_does_not_keep_the_others_from_the_next_step(said):
    assert said("one_rank_alone_loads_and_the_next_step_is_saved") == [["step-15_ckpt", 15, [15.0]]] * 2


def test_after_the_refusal_all_ranks_can_load_the_version_and_go_on(said):
    assert said("after_the_refusal_all_ranks_load") == [[["StepError"], {"failures": {}, "newest": NEW}]] * 2
