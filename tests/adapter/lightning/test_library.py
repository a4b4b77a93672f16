"""The library form with plain Lightning: the recipe imports it, no agent is there."""

from __future__ import annotations

import pytest

from tests.adapter.lightning.support import exact, saves, steps

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("model_parallel", 2)])
def test_a_killed_run_goes_on_from_memory_and_ends_as_the_straight_run(plain_job, straight, strategy, ranks):
    argv = (*STEPS, "--strategy", strategy)
    library = ("--library", str(plain_job.base), "--every", "3")
    killed = plain_job.run(*argv, *library, "--kill-at", "20", "--kill-rank", str(ranks - 1), ranks=ranks)
    assert killed.statuses[-1] == -9, killed.log
    assert [steps(log) for log in killed.logs] == [[3, 6, 9, 12, 15, 18]] * ranks
    again = plain_job.run(*argv, *library, ranks=ranks)
    assert again.statuses == [0] * ranks, again.log
    assert [result["started_at"] for result in again.results] == [18] * ranks
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*argv, ranks=ranks)]
    assert again.results[0]["ckpt_path"] == f"{plain_job.base}/step-18_ckpt"
    assert plain_job.versions() == []


@pytest.mark.parametrize(
    ("agent", "every", "kill_at", "started_at"),
    [(False, "3", "17", 15), (False, "9", "11", 10), (True, "9", "11", 10)],
    ids=["memory is newer", "the path is newer", "the path is newer under the agent"],
)
def test_a_ckpt_path_given_to_fit_is_compared_with_the_version_that_auto_resume_has_chosen(
    job, plain_job, straight, agent, every, kill_at, started_at
):
    chosen = job if agent else plain_job
    argv = (*STEPS, "--durable-every", "10", "--library", str(chosen.base), "--every", every)
    assert chosen.run(*argv, "--kill-at", kill_at).statuses == [-9]
    path = chosen.folder / "durable" / "step=10.ckpt"
    again = chosen.run(*argv, "--ckpt-path", str(path))
    assert again.statuses == [0] and again.results[0]["started_at"] == started_at, again.log
    if started_at == 15:
        assert f"going on from memory, step 15, not from {path} of step 10: " in again.log
        assert exact(again.results[0]) == exact(straight(*STEPS)[0])
    else:
        assert f"nothing newer in memory than {path} of step 10" in again.log
        assert "the durable checkpoint of step 10 is newer" in again.log


def test_steps_of_the_standard_interval_are_skipped(plain_job):
    argv = ("--library", str(plain_job.base), "--every", "2", "--skip-every", "6", "--durable-every", "6")
    assert steps(plain_job.run("--steps", "12", *argv).log) == [2, 4, 8, 10]


def test_the_saves_of_an_ordinary_model_checkpoint_at_epochs_are_counted_on(plain_job):
    # an epoch has 16 batches; the last one ends with the training
    argv = ("--steps", "40", "--library", str(plain_job.base), "--every", "4", "--durable-epochs", "1")
    outcome = plain_job.run(*argv)
    assert steps(outcome.log) == [4, 8, 12, 20, 24, 28, 36]
    assert "did not come" not in outcome.log


def test_a_save_to_a_path_of_the_container_goes_to_memory_on_every_rank(plain_job):
    argv = ("--steps", "12", "--strategy", "ddp", "--library", str(plain_job.base), "--every", "100")
    killed = plain_job.run(*argv, "--direct-at", "5", "--kill-at", "7", ranks=2)
    assert killed.statuses[0] == -9 and [steps(log) for log in killed.logs] == [[5], [5]]
    again = plain_job.run(*argv, ranks=2)
    assert [result["started_at"] for result in again.results] == [5, 5], again.log


def test_an_error_keeps_the_versions(plain_job):
    argv = ("--steps", "12", "--library", str(plain_job.base))
    assert plain_job.run(*argv, "--kill-at", "9", "--kill", "RAISE").statuses == [1]
    assert len(plain_job.versions()) == 2


def test_under_the_agent_too_there_is_one_save_per_step(job, straight):
    argv = ("--steps", "12", "--library", str(job.base), "--every", "3")
    killed = job.run(*argv, "--kill-at", "8")
    assert steps(killed.log) == [3, 6] and len(saves(killed.log)) == 2
    again = job.run(*argv)
    assert again.results[0]["started_at"] == 6
    assert exact(again.results[0]) == exact(straight("--steps", "12")[0])


@pytest.mark.parametrize(
    "check",
    [
        "every_leaf_comes_back_as_it_was",
        "the_library_refuses_what_it_cannot_do",
        "a_disabled_callback_does_nothing",
        "a_trainer_that_never_fits_stops_no_other",
        "a_wrapped_trainer_that_nobody_holds_is_given_up",
        "ranks_that_cannot_agree_before_fit_choose_within_it",
        "a_path_of_another_step_or_of_none_is_refused",
        "the_same_trainer_fits_twice",
        "strategies_whose_library_is_missing_here_are_refused_by_name",
        "parameters_of_the_guide_that_the_store_decides_itself_change_nothing",
    ],
)
def test_inside(plain_zygote, check):
    outcome = plain_zygote.run(["--inside", check], environ={"MLFLASHPOINT_JOB_ID": "job"})
    assert outcome.statuses == [0], outcome.log
