"""Validations around a resume, and what looks at their scores: as if there had been no kill."""

from __future__ import annotations

import re

import pytest

from tests.adapter.lightning.support import exact

pytestmark = pytest.mark.multiprocess

#: an epoch has 16 batches; counted in epochs, so that the loops have to count right
EPOCHS = ("--steps", "-1", "--epochs", "3")


def resumed(job, every: int, *argv: str, kill: tuple[str, ...] = ()) -> dict:
    """The result of a run that was killed behind the save of the first ``every`` steps, and started again."""
    killed = job.run(*argv, *(kill or ("--kill-at", str(every + 1))), save_every_n_steps=every)
    assert killed.statuses == [-9], killed.log
    again = job.run(*argv, save_every_n_steps=every)
    assert again.statuses == [0] and again.results[0]["started_at"] == every, again.log
    return again.results[0]


def check(found: dict, expected: dict, step: int) -> None:
    assert exact(found) == exact(expected)
    assert found["scores"] == [[at, score] for at, score in expected["scores"] if at >= step]
    assert found["best"] == expected["best"]


@pytest.mark.parametrize(
    ("every", "validate", "schedule"),
    [
        # due at the saved step; known from before it, at the end of an epoch; and looked at behind the saved batch
        (12, 12, "score"),
        (16, 12, "score"),
        (28, 12, "score by steps"),
    ],
)
def test_a_scheduler_sees_the_scores_that_it_would_have_seen(job, straight, every, validate, schedule):
    argv = (*EPOCHS, "--validate-every", str(validate), "--schedule", schedule)
    check(resumed(job, every, *argv), straight(*argv)[0], every)


@pytest.mark.parametrize("step", [16, 48])
def test_a_validation_that_a_kill_has_broken_off_is_made_anew_with_the_end_of_its_epoch(job, straight, step):
    # step 48 is the last one of the training
    argv = (*EPOCHS, "--validate-every", "16", "--schedule", "score", "--best")
    check(resumed(job, step, *argv, kill=("--kill-validation", str(step))), straight(*argv)[0], step)


@pytest.mark.parametrize(
    "kill",
    [
        # behind the end of an epoch, within the validation there, and within that behind the last step
        ("--kill-at", "49"),
        ("--kill-validation", "48"),
        ("--kill-validation", "64"),
    ],
    ids="-".join,
)
def test_a_trainer_that_fits_for_the_second_time_makes_the_validation_that_was_due(job, straight, kill):
    argv = ("--steps", "-1", "--epochs", "2", "--more-epochs", "2", "--validate-every", "16", "--durable-epochs", "1")
    settings = {"save_every_n_steps": 16, "skip_durable_steps": 0}
    killed = job.run(*argv, *kill, **settings)
    assert killed.statuses == [-9] and job.versions("lightning") == [], killed.log
    again = job.run(*argv, **settings)
    found, expected, step = again.results[0], straight(*argv)[0], int(kill[1]) // 16 * 16
    assert again.statuses == [0] and found["started_at"] == step, again.log
    assert exact(found) == exact(expected)
    # The first fit, which had ended well before the kill, is made anew.
    assert found["scores"] == [one for one in expected["scores"] if one[0] <= 32 or one[0] >= step]
    # Lightning gives another name to a file that it makes once more.
    assert {re.sub(r"-v\d", "", name): file for name, file in found["files"].items()} == expected["files"]
    assert job.versions("*") == []


@pytest.mark.parametrize("every", [16, 20])
def test_the_mean_over_an_epoch_is_that_of_the_whole_epoch(job, straight, every):
    argv = (*EPOCHS, "--schedule", "mean")
    check(resumed(job, every, *argv), straight(*argv)[0], every)


def test_ranks_resume_with_their_validation_together(job, straight):
    argv = (*EPOCHS, "--validate-every", "16", "--schedule", "score", "--strategy", "ddp")
    killed = job.run(*argv, "--kill-at", "17", ranks=2, save_every_n_steps=16)
    assert -9 in killed.statuses, killed.log
    again = job.run(*argv, ranks=2, save_every_n_steps=16)
    assert again.statuses == [0, 0], again.log
    for found, expected in zip(again.results, straight(*argv, ranks=2), strict=True):
        check(found, expected, 16)
