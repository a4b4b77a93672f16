"""Two Trainers in one process, in both forms: one after the other each has its own versions, at once one is refused."""

from __future__ import annotations

import pytest

from tests.adapter.lightning.support import Job, exact, saves, steps

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "12")


@pytest.fixture(params=["agent", "library"])
def form(request) -> str:
    return request.param


@pytest.fixture
def chosen(form, job, plain_job) -> Job:
    return {"agent": job, "library": plain_job}[form]


@pytest.fixture
def more(form, chosen) -> tuple[str, ...]:
    return ("--library", str(chosen.base), "--every", "3") if form == "library" else ()


def test_one_after_the_other_never_take_each_others_versions(chosen, more, straight):
    argv = (*STEPS, "--fits", "2")
    killed = chosen.run(*argv, *more, "--kill-at", "8")
    assert killed.statuses == [-9] and steps(killed.log) == [3, 6, 9, 12, 3, 6], killed.log
    assert chosen.versions("lightning") == [] and len(chosen.versions("lightning-2")) == 2
    again = chosen.run(*argv, *more)
    assert again.statuses == [0], again.log
    assert [fit["started_at"] for fit in again.results[0]["fits"]] == [0, 6]
    assert [exact(fit) for fit in again.results[0]["fits"]] == [exact(fit) for fit in straight(*argv)[0]["fits"]]
    assert chosen.versions("*") == []


def test_the_first_ones_versions_survive_what_the_second_does_where_they_are_kept(chosen, more):
    outcome = chosen.run(*STEPS, "--fits", "2", *more, keep_on_success=1)
    assert outcome.statuses == [0], outcome.log
    assert [(save["group"], save["step"]) for save in saves(outcome.log)] == [
        (group, step) for group in ("lightning", "lightning-2") for step in (3, 6, 9, 12)
    ]
    assert len(chosen.versions("lightning")) == len(chosen.versions("lightning-2")) == 2


def test_one_that_fits_within_another_is_refused_and_told_the_remedy_and_the_other_saves_on(chosen, more, straight):
    killed = chosen.run(*STEPS, *more, "--inner-fit-at", "4", "--kill-at", "11")
    assert killed.statuses == [-9] and steps(killed.log) == [3, 6, 9], killed.log
    (error,) = [line for line in killed.log.splitlines() if line.startswith("ERROR")]
    assert "another Trainer of this process is fitting" in error and "let one fit end before the next" in error
    assert len(chosen.versions("lightning")) == 2 and chosen.versions("lightning-2") == []
    again = chosen.run(*STEPS, *more)
    assert again.statuses == [0] and again.results[0]["started_at"] == 9, again.log
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


def test_of_two_that_fit_in_threads_at_once_the_second_is_refused(agent_zygote):
    check = ["--inside", "trainers_that_fit_in_threads_at_once_save_once"]
    outcome = agent_zygote.run(check, environ={"MLFLASHPOINT_JOB_ID": "job"})
    assert outcome.statuses == [0], outcome.log
    assert outcome.log.count("another Trainer of this process is fitting") == 1


@pytest.mark.parametrize(
    "check",
    [
        "trainers_that_begin_in_threads_at_once_save_once",
        "wrapped_trainers_that_begin_in_threads_at_once_save_once",
    ],
)
def test_of_two_that_begin_in_threads_at_the_same_moment_one_is_refused(agent_zygote, plain_zygote, check):
    zygote = plain_zygote if check.startswith("wrapped") else agent_zygote
    outcome = zygote.run(["--inside", check], environ={"MLFLASHPOINT_JOB_ID": "job"})
    assert outcome.statuses == [0], outcome.log
    assert outcome.log.count("another Trainer of this process is fitting") == 1


@pytest.mark.parametrize(
    "check", ["a_trainer_that_has_fitted_is_given_up", "a_wrapped_trainer_that_has_fitted_is_given_up"]
)
def test_one_that_has_fitted_and_that_nobody_holds_is_given_up(agent_zygote, plain_zygote, check):
    zygote = plain_zygote if "wrapped" in check else agent_zygote
    outcome = zygote.run(["--inside", check], environ={"MLFLASHPOINT_JOB_ID": "job"})
    assert outcome.statuses == [0], outcome.log
