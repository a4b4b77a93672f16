"""Saves that differ from the one before, or from rank to rank, on two real ranks in one launch."""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """``(base container's folder, report of each rank)``."""
    folder = tmp_path_factory.mktemp("changes")
    with memory_folder() as base:
        yield base, launch.launch(Path(__file__).parent / "changes_worker.py", 2, [base], folder)


@pytest.fixture
def said(job):
    """Scenario -> what each rank reports of it; a scenario that broke fails the test with its traceback."""

    def of(scenario):
        found = [report.get(scenario, {"error": "it was not reached"}) for report in job[1]]
        broken = [result["error"] for result in found if isinstance(result, dict) and "error" in result]
        assert not broken, "\n".join(broken)
        return found

    return of


def test_structures_may_change_in_turn_while_the_background_is_late(said):
    for result in said("structures_in_turn_while_the_background_is_late"):
        assert result["failures"] == {}
        assert result["newest"] == ["step-3_ckpt", "3", "[3.0]"]


def test_one_writer_serves_saves_of_all_ranks_and_of_each_for_itself_in_turn(said):
    assert said("a_save_of_all_ranks_after_one_of_each_for_itself") == [[True] * 5] * 2


def test_ranks_that_save_different_steps_are_told_both_before_anybody_writes(said, job):
    results = said("ranks_that_save_different_steps")
    for result in results:
        for failed in (result["failed"], result["again"]):
            assert {kind for kind, _ in failed["failures"].values()} == {"StepError"}
            for _, text in failed["failures"].values():
                assert f"{job[0]}/job/step-70_ckpt: rank 0" in text and f"{job[0]}/job/step-71_ckpt: rank 1" in text
            assert failed["seconds"] < 10
        assert result["newest"] == ["step-20_ckpt", 20, [20.0]]
    assert results[0]["failed"]["failures"] == results[1]["failed"]["failures"]


def test_both_steps_can_be_saved_by_all_ranks_afterwards(said):
    assert said("after_ranks_that_saved_different_steps") == [[["step-70_ckpt", 70], ["step-71_ckpt", 71]]] * 2


def test_a_step_whose_plan_had_failed_can_be_saved(said):
    assert said("a_step_is_saved_after_its_plan_had_failed") == [[["1"], {}, ["step-80_ckpt", 80]]] * 2


def test_the_mark_on_a_plan_that_a_planner_has_kept_is_not_taken_for_this_saves(said):
    assert said("a_planner_that_keeps_one_ranks_plan") == [[["step-90_ckpt", 90], ["step-91_ckpt", 91]]] * 2
