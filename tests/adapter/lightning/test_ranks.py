"""Plain Lightning on two ranks under the agent: DDP, FSDP and ModelParallel, each rank its own part."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.adapter.lightning import support
from tests.adapter.lightning.support import exact, saves, steps

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")


@pytest.mark.parametrize(("strategy", "victim"), [("ddp", 0), ("fsdp", 1), ("model_parallel", 1)])
def test_a_job_whose_rank_is_killed_goes_on_on_all_ranks_and_ends_as_the_straight_run(job, straight, strategy, victim):
    argv = (*STEPS, "--strategy", strategy)
    killed = job.run(*argv, "--kill-at", "20", "--kill-rank", str(victim), ranks=2)
    assert killed.statuses[victim] == -9 and killed.statuses[1 - victim] != 0
    again = job.run(*argv, ranks=2)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [18, 18]
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*argv, ranks=2)]
    assert job.versions() == [], "a good end removes the versions of all ranks"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "model_parallel"])
def test_the_newer_of_memory_and_the_recipes_own_checkpoint_wins_on_all_ranks(job, other_job, straight, strategy):
    argv = (*STEPS, "--strategy", strategy, "--durable-every", "10")
    assert -9 in job.run(*argv, "--kill-at", "17", ranks=2).statuses
    again = job.run(*argv, "--ckpt-path", str(job.folder / "durable" / "step=10.ckpt"), ranks=2)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [15, 15]
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*argv, ranks=2)]
    assert -9 in other_job.run(*argv, "--kill-at", "20", ranks=2).statuses
    again = other_job.run(*argv, "--ckpt-path", str(other_job.folder / "durable" / "step=20.ckpt"), ranks=2)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [20, 20]


@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_the_ranks_store_different_shards_that_together_are_the_state(job, strategy):
    argv = ("--steps", "3", "--width", "4096", "--strategy", strategy)
    outcome = job.run(*argv, ranks=2)
    ranks = [saves(log)[-1]["bytes"] for log in outcome.logs]
    whole = saves(job.run(*argv).log)[-1]["bytes"]
    # what is beside the tensors every rank has
    assert whole <= sum(ranks) < 1.2 * whole and max(ranks) < 0.7 * whole, (ranks, whole)
    assert outcome.results[0]["weights"] != outcome.results[1]["weights"]


def test_a_search_for_the_rate_before_the_state_is_loaded_changes_nothing(job, straight):
    argv = (*STEPS, "--strategy", "model_parallel", "--lr-find", "set")
    assert -9 in job.run(*argv, "--kill-at", "20", ranks=2).statuses
    again = job.run(*argv, ranks=2)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [18, 18]
    for found, expected in zip(again.results, straight(*argv, ranks=2), strict=True):
        assert exact(found) == exact(expected) and found["rate"] == expected["rate"]


def test_ddp_goes_on_with_another_number_of_ranks(job):
    argv = (*STEPS, "--strategy", "ddp")
    assert job.run(*argv, "--kill-at", "20", ranks=2).statuses[0] == -9
    again = job.run(*argv)
    assert again.statuses == [0], again.log
    assert again.results[0]["started_at"] == 18 and again.results[0]["events"] == ["restored 18"]


def test_sharded_state_of_another_number_of_ranks_is_refused_and_training_starts_anew(job):
    argv = (*STEPS, "--strategy", "fsdp")
    assert job.run(*argv, "--kill-at", "8", "--kill-rank", "1", ranks=2).statuses[1] == -9
    again = job.run(*argv)
    assert again.statuses == [0] and again.results[0]["started_at"] == 0
    assert "saved by 2 ranks, the job has 1" in again.log


def test_a_rank_whose_save_fails_makes_that_version_alone_incomplete(job):
    argv = ("--steps", "24", "--strategy", "ddp")
    # rank 1 alone can't store step 18, so the ranks go on from 15
    killed = job.run(*argv, "--foreign-at", "18", "--foreign-rank", "1", "--kill-at", "20", "--settle-s", "1", ranks=2)
    assert 18 in steps(killed.logs[0]) and 18 not in steps(killed.logs[1])
    again = job.run(*argv, ranks=2)
    assert [result["started_at"] for result in again.results] == [15, 15], again.log


def test_a_sharded_optimizer_is_refused_by_name_and_training_goes_on(job):
    outcome = job.run("--steps", "6", "--strategy", "ddp", "--zero", ranks=2)
    assert outcome.statuses == [0, 0], outcome.log
    assert "ZeroRedundancyOptimizer" in outcome.log and "DDPStrategy" in outcome.log and steps(outcome.log) == []


def test_lightnings_own_launcher_survives_a_kill_too(package, tmp_path, straight):
    base = support.new_base()
    environ = {
        **support.environ(package, agent=True),
        "MLFLASHPOINT_SAVE_EVERY_N_STEPS": "3",
        "MLFLASHPOINT_BASE_CONTAINER": str(base),
        "RECIPE_DEVICES": "2",
    }
    command = [str(support.PYTHON), "-m", "mlflashpoint.run", str(support.RECIPE)]
    command += ["--dir", str(tmp_path), "--out", str(tmp_path), "--strategy", "ddp", *STEPS]
    try:
        first = subprocess.run([*command, "--kill-at", "20"], env=environ, capture_output=True, text=True, timeout=120)
        assert first.returncode == -signal.SIGKILL, first.stderr
        again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    finally:
        support.clean(base)
    assert again.returncode == 0, again.stderr
    assert "going on from memory, step 18" in again.stderr, first.stderr + again.stderr
    found = json.loads((tmp_path / "result-0.json").read_text())
    assert found["started_at"] == 18
    assert exact(found) == exact(straight(*STEPS, "--strategy", "ddp", ranks=2)[0])
