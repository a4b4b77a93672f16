"""Saves that differ from the one before, or from rank to rank, on two real ranks in one launch."""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(warm, tmp_path_factory):
    """``(base container's folder, report of each rank)``."""
    folder, worker = tmp_path_factory.mktemp("changes"), Path(__file__).with_name("changes_worker.py")
    with memory_folder() as base:
        yield base, launch.fork(warm.zygote(False), worker, 2, [base], folder / "ranks")


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


def test_a_state_that_contains_itself_on_one_rank_is_refused_on_all_by_its_place(said):
    for result in said("a_state_that_contains_itself_on_one_rank"):
        for failures in result[:3]:
            ((rank, (kind, text)),) = failures.items()
            assert (rank, kind) == ("1", "StateTypeError")
            assert "odd.again: the state contains itself" in text and "remedy" in text
        assert result[3:] == [{}, ["step-103_ckpt", 103]]


def test_the_mark_on_a_plan_that_a_planner_has_kept_is_not_taken_for_this_saves(said):
    assert said("a_planner_that_keeps_one_ranks_plan") == [[["step-90_ckpt", 90], ["step-91_ckpt", 91]]] * 2


def test_a_nested_tensor_is_refused_by_key_type_and_remedy(said):
    for refused in said("nested_tensors"):
        for kind, text, ranks in refused:
            assert kind == "StateTypeError" and ranks == ["1"]
            assert "'deep.n'" in text and "nested" in text and "remedy: save what it consists of" in text


def test_a_nested_tensor_on_one_rank_fails_an_async_save_on_all(said):
    for (kind, text), ranks in said("a_nested_tensor_on_one_rank_in_an_async_save"):
        assert kind == "StateTypeError" and "'n'" in text and ranks == ["1"]


def test_what_a_planner_of_the_users_own_raises_comes_out_with_the_key(said):
    for rank, kind, text, notes in said("a_planner_whose_resolve_data_raises"):
        assert (rank, kind, text) == (1, "ValueError", "boom")
        assert len(notes) == 1 and "'bad1'" in notes[0] and "Raising" in notes[0]


def test_an_object_that_is_not_plain_is_refused_with_rank_step_and_path(said, job):
    for refused in said("objects_that_are_not_plain"):
        for step, (kind, text, ranks) in zip((120, 121), refused, strict=True):
            assert kind == "StateTypeError" and ranks == ["1"]
            assert f"rank 1, step {step}, path {job[0]}/job/step-{step}_ckpt" in text and "'deep.lock'" in text
