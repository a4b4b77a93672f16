"""What a load, or the next save, meets when the background of the save before is not done; on two real ranks."""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(warm, tmp_path_factory):
    """``(base container's folder, report of each rank)``."""
    folder, worker = tmp_path_factory.mktemp("pending"), Path(__file__).with_name("pending_worker.py")
    with memory_folder() as base:
        yield base, launch.fork(warm.zygote(False), worker, 2, [base], folder / "ranks")


def holds(step):
    """What a rank's load of that step gives."""
    return [[float(step)], [float(step)], step]


@pytest.mark.parametrize(
    ("scenario", "step"),
    [
        ("a_load_after_a_save_that_rank_0_commits_late", 1),
        ("a_load_after_a_save_that_rank_1_commits_late", 2),
        ("a_load_after_the_future_of_an_async_save", 4),
    ],
)
def test_a_load_waits_for_the_save_of_its_version_on_all_ranks(said, scenario, step):
    assert said(scenario) == [holds(step)] * 2


def test_the_newest_is_the_version_whose_save_has_returned(said, job):
    assert said("the_newest_after_a_save") == [f"{job[0]}/job/step-3_ckpt"] * 2


def test_saves_without_a_pause_are_all_kept(said, job):
    for result in said("saves_without_a_pause"):
        assert result["loaded"] == [holds(14), holds(13)]
        assert result["newest"] == f"{job[0]}/job/step-14_ckpt"
        assert result["failed"] == 0


def test_async_saves_take_turns(said):
    for result in said("async_saves_without_waiting_for_the_one_before"):
        assert result == {"kinds": ["Metadata"] * 4, "loaded": holds(23), "failed": 0}


def test_a_save_waits_for_the_async_save_before_it(said):
    assert said("a_save_while_an_async_save_is_under_way") == [["Metadata", holds(24), holds(25)]] * 2


def test_a_save_that_finds_no_slot_in_time_is_skipped_by_name_on_all_ranks(said):
    for result in said("a_save_that_finds_no_slot_in_time"):
        for rank in ("0", "1"):
            assert result["skipped"]["failures"][rank][0] == "SlotBusyError"
            kind, text = result["again"]["failures"][rank]
            assert kind == "StepError" and "was skipped" in text and "under the next step" in text
        assert result["after"] == holds(32)


def test_a_good_run_logs_one_line_per_save_and_no_warning(said):
    for result in said("a_good_run_in_the_log"):
        assert len(result["records"]) <= result["saves"], result["records"]
        assert {level for level, _ in result["records"]} == {"INFO"}


def test_a_save_that_dcp_lets_go_of_holds_nobody_up(said, job):
    for result in said("the_newest_after_a_save_whose_planner_failed_on_one_rank"):
        assert result["failures"] == {"1": ["ValueError", "no plan"]}
        assert result["newest"] == f"{job[0]}/job/step-50_ckpt"
        # All waits for the coordinator's word end after 60 s.
        assert result["seconds"] < 30
        assert result["after"] == holds(52)


@pytest.mark.parametrize(
    ("scenario", "step"),
    [
        ("an_unregistered_object_with_the_stores_planner", 100),
        ("an_unregistered_object_with_dcps_planner", 102),
        ("an_unregistered_object_in_an_async_save", 104),
    ],
)
def test_an_unregistered_object_is_refused_by_name_on_all_ranks(said, job, scenario, step):
    for result in said(scenario):
        assert list(result["failures"]) == ["1"]
        kind, text = result["failures"]["1"]
        assert kind == "StateTypeError"
        for word in ("own1.many[1]", "Unregistered", "register_leaf", "add_safe_globals"):
            assert word in text
        assert result["seconds"] < 30
        assert result["newest"] == f"{job[0]}/job/step-{step}_ckpt"
        assert result["before"] == holds(step)


@pytest.mark.parametrize(
    ("scenario", "step"),
    [
        ("a_tensor_that_one_rank_cant_copy_with_the_stores_planner", 106),
        ("a_tensor_that_one_rank_cant_copy_with_dcps_planner", 108),
    ],
)
def test_a_tensor_that_one_rank_cant_copy_is_refused_by_name_on_all_ranks(said, job, scenario, step):
    for result in said(scenario):
        assert list(result["failures"]) == ["1"]
        kind, text = result["failures"]["1"]
        assert kind == "StateTypeError" and "'all' is a torch.Tensor, which can't be copied" in text
        assert f"rank 1, step {step + 1}" in text
        assert result["seconds"] < 30
        assert result["newest"] == f"{job[0]}/job/step-{step}_ckpt"
        assert result["before"] == holds(step)


@pytest.mark.parametrize(
    ("scenario", "thing"),
    [
        ("an_object_on_our_allow_list", ["Allowed", 7]),
        ("an_object_on_torchs_allow_list", ["Listed", 8]),
        ("a_planner_that_serialises_by_itself", ["Unregistered", 9]),
    ],
)
def test_what_is_registered_or_serialised_by_the_user_comes_back(said, scenario, thing):
    assert said(scenario) == [thing] * 2


def test_a_step_whose_save_had_failed_is_saved_after_a_rollback_below_it(said):
    for result in said("a_rollback_to_a_step_whose_save_had_failed"):
        assert result == {"failed": ["1"], "newest": [121, 122], "loaded": holds(122)}


def test_a_rank_that_saves_to_another_container_than_before_is_told_so_on_all(said, job):
    for result in said("one_rank_saves_elsewhere"):
        ((name, text),) = {tuple(error) for error in result["failures"].values()}
        assert name == "StepError" and f"{job[0]}/elsewhere/step-131_ckpt: rank 1" in text
        assert (result["newest"], result["loaded"]) == (132, holds(132))
