"""What scripts do with their checkpoints afterwards, under ``replace``: none that the script counts on is lost."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.adapter.pytorch.script.jobs import Job
from tests.adapter.pytorch.script.test_script import is_memory_only

pytestmark = pytest.mark.multiprocess
HABITS = Path(__file__).with_name("habits.py")


@pytest.fixture
def job(tmp_path, warm):
    made = []

    def make(*, torchrun=False, **settings):
        made.append(Job(tmp_path, warm=None if torchrun else warm, **{"DCP_MODE": "replace", **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def on_disk(folder):
    """The step of the durable checkpoint in ``folder``, as torch alone loads it."""
    state = {"p": {"step": 0, "weight": torch.zeros(4)}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["p"]["weight"].tolist() == [float(state["p"]["step"])] * 4
    return state["p"]["step"]


def steps(folder):
    return {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}


def test_what_a_script_renames_alternates_ranks_by_score_or_saves_in_families_is_durable_when_the_node_dies(job):
    one = job(torchrun=True)
    one.start("--habit", "lines", script=HABITS, fails=True)
    found = one.checkpoints
    assert [on_disk(found / "renamed" / f"step-{step}") for step in (1, 2, 3)] == [1, 2, 3]
    for decay in ("0.9", "0.99", "0.999"):
        assert [on_disk(found / f"ema-{decay}" / f"step-{step}") for step in (1, 2, 3)] == [1, 2, 3]
    assert steps(found / "best") == {1, 5}
    assert [on_disk(found / "best" / f"step-{step}") for step in (1, 5)] == [1, 5]
    # The node died while slot-0 was overwritten; the other folder is what a script alternates for.
    assert on_disk(found / "two" / "slot-1") == 2
    assert one.log.count("every save is durable from now on") == 4


def test_that_every_save_is_durable_by_now_is_known_though_the_memory_of_rank_0_is_lost(job):
    one = job()
    one.start("--habit", "scored", script=HABITS, fails=True)
    assert one.log.count("every save is durable from now on") == 1
    (journal,) = one.memory.glob("dcp-*/seat-0/script/journal.json")
    journal.unlink()
    one.start("--habit", "scored", script=HABITS, fails=True)
    assert steps(one.checkpoints) == {1, 6}
    assert [on_disk(one.checkpoints / f"step-{step}") for step in (1, 6)] == [1, 6]


def test_a_renamed_checkpoint_is_loaded_from_memory_and_another_run_leaves_both_runs_whole(job):
    one = job(ranks=1)
    one.start("--habit", "plain", script=HABITS, fails=True)
    run_1, run_2 = one.checkpoints / "run-1", one.checkpoints / "run-2"
    assert "every save is durable from now on" not in one.log
    assert is_memory_only(run_1 / "step-4") and is_memory_only(run_1 / "kept")
    reports = one.start("--habit", "other_run", script=HABITS, fails=True)
    assert reports[0]["resumed"] == 5
    assert on_disk(run_1 / "kept") == 5
    assert on_disk(run_2 / "step-1") == 11
    assert is_memory_only(run_2 / "step-2")
    before = sorted(path.name for path in run_1.iterdir())
    one.forget_memory()
    one.start("--habit", "latest", script=HABITS, fails=True)
    assert "NoVersionError" in one.log
    assert os.readlink(run_2 / "latest") == "step-1"
    assert sorted(path.name for path in run_2.iterdir()) == ["latest", "notes.txt", "step-1"]
    assert sorted(path.name for path in run_1.iterdir()) == before
    assert one.start("--habit", "latest", script=HABITS)[0]["resumed"] == 11


@pytest.mark.parametrize(("mode", "habit"), [("augment", "raising"), ("replace", "hanging")])
def test_what_one_rank_raises_comes_out_at_once_and_a_rank_that_hangs_ends_memory_saves_once(job, mode, habit):
    """The ranks are those of mp.spawn, which sets no LOCAL_RANK."""
    one = job(torchrun=True, ranks=1, DCP_MODE=mode)
    one.start("--habit", habit, "--spawn", script=HABITS)
    first, second = (json.loads((one.folder / "out" / f"report-{rank}.json").read_text()) for rank in (0, 1))
    sentence = "the weights of rank 1 can't be gathered now"
    assert second["caught"] == [[step, "RuntimeError", sentence] for step in (2, 4)]
    assert [entry[:2] for entry in first["caught"]] == [[step, "CheckpointException"] for step in (2, 4)]
    assert all(sentence in text for _, _, text in first["caught"])
    assert first["saved"] == second["saved"] == [1, 3, 5]
    assert first["resumed"] == second["resumed"] == 5
    assert "step-5 is loaded from memory" in one.log
    assert "did not come within" not in one.log
    assert is_memory_only(one.checkpoints / "step-3") == (mode == "replace")
    if habit == "hanging":
        assert [on_disk(one.checkpoints / "slow" / f"step-{step}") for step in range(1, 6)] == [1, 2, 3, 4, 5]
        assert one.log.count("checkpoints are left to the script from now on") == 2


def test_a_checkpoint_that_the_script_has_saved_to_in_its_own_way_is_not_written_over_at_the_end(job):
    one = job()
    one.start("--habit", "around", script=HABITS)
    assert on_disk(one.checkpoints / "step-3") == 4
    assert on_disk(one.checkpoints / "step-2") == 2


def test_going_back_further_than_memory_does_takes_no_folder_away_and_names_what_can_be_loaded(job):
    one = job(ranks=1)
    (report,) = one.start("--habit", "going_back", script=HABITS)
    assert report["caught"].startswith("NoVersionError")
    assert "memory has the newest 2 checkpoints" in report["caught"]
    assert str(one.checkpoints / "step-1") in report["caught"] and "DCP_MODE=augment" in report["caught"]
    assert report["left"] == ["step-1", "step-2", "step-3", "step-4"]
    assert report["resumed"] == 3
    assert on_disk(one.checkpoints / "step-5") == 5


def test_a_start_that_looks_at_older_checkpoints_loses_none_and_leaves_the_newest_on_disk(job):
    one = job(ranks=1)
    one.start("--habit", "dying_later", script=HABITS, fails=True)
    (report,) = one.start("--habit", "looking_back", script=HABITS)
    assert report["resumed"] == [3, 4, 3, 1]
    assert report["caught"].startswith("NoVersionError") and "memory has the newest 2 checkpoints" in report["caught"]
    assert report["left"] == ["step-1", "step-2", "step-3", "step-4"]
    assert [on_disk(one.checkpoints / f"step-{step}") for step in (3, 4)] == [3, 4]


def test_a_disk_that_refuses_the_newest_checkpoint_at_the_end_fails_the_job_which_goes_on_from_memory(job):
    one = job()
    one.start("--habit", "refused", script=HABITS, fails=True)
    assert one.log.count("stays in memory only, and is found there if the same job starts again") == 1
    assert "CheckpointException" in one.log
    assert is_memory_only(one.checkpoints / "step-3")
    assert [report["resumed"] for report in one.start("--habit", "again", script=HABITS)] == [3, 3]
    assert on_disk(one.checkpoints / "step-3") == 3


def test_what_more_ranks_saved_is_whole_on_disk_when_the_script_ends(job):
    one = job(ranks=2)
    one.start("--habit", "dying", script=HABITS, fails=True)
    assert is_memory_only(one.checkpoints / "step-3")
    one.ranks = 1
    assert [report["resumed"] for report in one.start("--habit", "newest", script=HABITS)] == [3]
    assert on_disk(one.checkpoints / "step-3") == 3
    state = {"p": {"rank-0": 0, "rank-1": 0}}
    dcp.load(state, checkpoint_id=one.checkpoints / "step-3", no_dist=True)
    assert set(state["p"].values()) == {3}
