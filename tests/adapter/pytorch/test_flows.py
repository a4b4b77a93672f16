"""The flows of the user guide's section on DCP, and what goes wrong in them, on two real ranks in one launch."""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(warm, tmp_path_factory):
    """``(base container folder, report of each rank)``."""
    folder, worker = tmp_path_factory.mktemp("flows"), Path(__file__).with_name("flows_worker.py")
    with memory_folder() as base:
        yield base, launch.fork(warm.zygote(False), worker, 2, [base, folder / "durable"], folder / "ranks")


@pytest.fixture
def refused(said):
    """The same for one that raises: ``{rank: (type, text)}``, equal on all ranks."""

    def of(scenario, found=None):
        failures = [result["failures"] for result in found or said(scenario)]
        assert failures[0] == failures[1]
        return {int(rank): tuple(failure) for rank, failure in failures[0].items()}

    return of


def test_before_the_first_save_there_is_nothing_to_recover(said):
    assert said("nothing_saved_yet") == [{"latest": None}] * 2


def test_the_long_form_saves_finds_and_loads(said, job):
    for result in said("guide_sync_save"):
        assert result["latest"] == f"{job[0]}/guide/step-3_ckpt"
        assert result["differing"] == []
        assert result["metadata"] == "Metadata" and result["keys"] > 40


def test_the_long_form_saves_in_a_checkpoint_process(said, job):
    for result in said("the_long_form_with_a_process"):
        assert result["latest"] == f"{job[0]}/long/step-2_ckpt"
        assert result["differing"] == []


def test_a_store_takes_what_the_state_needs_and_not_what_the_guides_buffer_size_says(said):
    # 1 GiB was asked for.
    assert max(result["store_bytes"] for result in said("the_long_form_with_a_process")) < 64 << 20


def test_what_changes_after_the_save_is_not_in_it(said):
    assert [result["differing"] for result in said("tensors_changed_right_after_the_save")] == [[], []]


def test_async_save_with_a_thread(said, job):
    for result in said("async_save_with_a_thread"):
        assert result == {"latest": f"{job[0]}/guide/step-5_ckpt", "differing": []}


def test_async_save_with_a_process(said, job):
    for result in said("async_save_with_a_process"):
        assert result["before"] is None
        assert result["latest"] == f"{job[0]}/process/step-2_ckpt"
        assert result["differing"] == []


def test_the_training_process_is_told_that_a_checkpoint_process_has_the_store(said, refused):
    failures = refused("", [result["mixed"] for result in said("async_save_with_a_process")])
    assert {rank: kind for rank, (kind, _) in failures.items()} == {0: "ContainerError", 1: "ContainerError"}
    assert "checkpoint process" in failures[0][1]


def test_an_older_version_that_is_still_there_can_be_loaded_by_name(said):
    assert said("the_version_before_is_still_there") == [{"differing": []}] * 2


@pytest.mark.parametrize(
    ("scenario", "kind", "ranks", "words"),
    [
        ("an_unknown_version", "NoVersionError", {0, 1}, ("step 77",)),
        ("a_folder_that_holds_no_store", "NoVersionError", {0, 1}, ("no memory container",)),
        (
            "an_object_that_nothing_can_serialise",
            "StateTypeError",
            {1},
            ("'bad.lock'", "_thread.lock", "register_leaf"),
        ),
        ("a_planner_that_gives_neither_tensor_nor_bytes", "StateTypeError", None, ("'odd'", "builtins.dict")),
        ("a_planner_whose_data_is_not_plain", "StateTypeError", {0}, ("_io.StringIO", "planner_data.note")),
    ],
)
def test_bad_input_is_a_named_error_on_all_ranks(refused, said, scenario, kind, ranks, words):
    failures = refused(scenario)
    assert failures and (ranks is None or set(failures) == ranks)
    for found, text in failures.values():
        assert found == kind
        assert all(word in text for word in words)
    assert max(result["seconds"] for result in said(scenario)) < 30


def test_a_near_miss_of_a_versions_name_is_refused(said):
    for rank, result in enumerate(said("a_name_that_is_no_version")):
        ((where, (kind, text)),) = result["failures"].items()
        assert (where, kind) == (str(rank), "CheckpointIdError")
        assert "step-7_ckpt_backup" in text


def test_failed_saves_leave_the_version_before_intact(said, job):
    for scenario in ("an_object_that_nothing_can_serialise", "a_planner_whose_data_is_not_plain"):
        assert [result["latest"] for result in said(scenario)] == [f"{job[0]}/guide/step-5_ckpt"] * 2


def test_the_save_after_a_failed_one_succeeds(said):
    assert said("a_save_after_failed_ones") == [{"differing": []}] * 2


def test_saving_a_step_again_keeps_the_version(said, job):
    for result in said("the_step_that_failed_again"):
        assert result == {"again": {}, "latest": f"{job[0]}/guide/step-9_ckpt"}


def test_the_short_form_saves_finds_and_loads(said, job):
    for result in said("short_form"):
        assert result == {"latest": f"{job[0]}/short/step-3_ckpt", "differing": []}


def test_a_second_store_of_a_process_is_refused_and_the_first_goes_on(said, job):
    for result in said("a_second_store"):
        assert "this process already has a store" in result.pop("refused")
        assert result == {"latest": f"{job[0]}/short/step-4_ckpt", "differing": []}


def test_planners_of_the_users_own(said):
    expected = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert said("planners_of_the_users_own") == [{"renamed": expected, "halved": expected, "widened": expected}] * 2


def test_thousands_of_small_tensors_are_planned_once(said):
    for result in said("thousands_of_small_tensors"):
        assert result["planned"] == [2000, 0, 0, 2000]
        assert result["equal"] and result["changed_equal"]


def test_a_state_of_another_shape_is_refused(refused):
    failures = refused("a_state_of_another_shape")
    assert set(failures) == {0, 1}
    assert all("for w" in text for _, text in failures.values())


def test_each_rank_can_save_for_itself(said):
    for rank, result in enumerate(said("each_rank_for_itself")):
        assert result == {"mine": [float(rank)] * 3, "who": rank}


def test_a_corrupt_shard_is_refused_by_name(said, refused):
    failures = refused("", [result["refused"] for result in said("a_corrupt_shard")])
    assert {rank: kind for rank, (kind, _) in failures.items()} == {1: "ShardCorruptError"}
    assert "has not the digest" in failures[1][1]


def test_after_a_corrupt_shard_all_ranks_take_the_version_before(said, job):
    for result in said("a_corrupt_shard"):
        assert result["latest"] == f"{job[0]}/short/step-40_ckpt"
        assert result["differing"] == []
