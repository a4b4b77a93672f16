"""Fits that end before their last step: by time, by a signal, by an exception, on one rank or on all."""

from __future__ import annotations

import pytest

from tests.adapter.lightning.support import clean, exact, observed, steps

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")
DDP = (*STEPS, "--strategy", "ddp")
EVERY_RANK = "-1"
#: longer than any of these takes: whoever is killed by it has hung
GRACE_S = 20
#: the time is over in the batch behind step 10
TIME = ("--max-time", "00:01:00:00", "--kill-at", "10", "--kill", "TIME", "--kill-rank", EVERY_RANK)


@pytest.mark.parametrize(
    ("how", "victim", "form"),
    [
        ("RAISE", EVERY_RANK, "agent"),
        ("RAISE", "1", "agent"),
        ("INT", EVERY_RANK, "agent"),
        ("RAISE", "1", "library"),
    ],
)
def test_what_breaks_a_fit_off_ends_the_job_at_once_and_keeps_the_versions(job, plain_job, straight, how, victim, form):
    chosen = {"agent": job, "library": plain_job}[form]
    argv = (*DDP, "--library", str(chosen.base), "--every", "3") if form == "library" else DDP
    broken = chosen.run(*argv, "--kill-at", "20", "--kill", how, "--kill-rank", victim, ranks=2, grace_s=GRACE_S)
    assert 0 not in broken.statuses and -9 not in broken.statuses, broken.log
    assert len(chosen.versions()) == 4, "two of each rank"
    again = chosen.run(*argv, ranks=2)
    assert again.statuses == [0, 0], again.log
    # an interrupt lets the batch in which it comes be trained to its end
    assert {result["started_at"] for result in again.results} in ({18}, {21})
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*DDP, ranks=2)]
    assert chosen.versions() == []


def test_sigterm_ends_the_job_at_once_and_what_it_drains_serves_when_all_memory_is_lost(job, straight, tmp_path):
    kill = ("--kill-at", "20", "--kill", "TERM", "--kill-rank", EVERY_RANK)
    broken = job.run(*DDP, *kill, ranks=2, grace_s=GRACE_S, drain_dir=tmp_path / "drain")
    # Lightning handles the signal itself, and an exception of its own ends the job.
    assert broken.statuses == [1, 1] and len(job.versions()) == 4, broken.log
    clean(job.base)
    again = job.run(*DDP, ranks=2, drain_dir=tmp_path / "drain")
    assert again.statuses == [0, 0], again.log
    # a signal lets the batch in which it comes be trained to its end
    assert {result["started_at"] for result in again.results} in ({18}, {21})
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*DDP, ranks=2)]


@pytest.mark.parametrize("form", ["agent", "library"])
def test_a_stop_by_max_time_keeps_the_saves_of_both(job, plain_job, form):
    chosen = {"agent": job, "library": plain_job}[form]
    argv = (*STEPS, "--durable-every", "4", *TIME)
    if form == "library":
        argv += ("--library", str(chosen.base), "--every", "3")
    stopped = chosen.run(*argv)
    assert stopped.statuses == [0] and stopped.results[0]["step"] == 11, stopped.log
    assert steps(stopped.log) == [3, 6, 9]
    assert {"step=4.ckpt", "step=8.ckpt", "last.ckpt"} == {path.name for path in (chosen.folder / "durable").iterdir()}
    assert len(chosen.versions()) == 2


def test_a_stop_by_max_time_keeps_the_versions_of_all_ranks(job):
    stopped = job.run(*DDP, *TIME, ranks=2, grace_s=GRACE_S)
    assert stopped.statuses == [0, 0] and [result["step"] for result in stopped.results] == [11, 11], stopped.log
    assert steps(stopped.logs[0]) == [3, 6, 9] and len(job.versions()) == 4


def test_a_start_with_more_time_goes_on_from_where_max_time_has_stopped(job, straight):
    argv = (*STEPS, "--durable-every", "4")
    stopped = job.run(*argv, *TIME)
    assert stopped.statuses == [0] and len(job.versions()) == 2, stopped.log
    again = job.run(*argv, "--max-time", "00:01:00:00", "--ckpt-path", str(job.folder / "durable" / "step=8.ckpt"))
    assert again.statuses == [0] and again.results[0]["started_at"] == 9, again.log
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])
    # 2.4 writes last.ckpt at the end of the epoch too
    assert {line["step"] for line in observed(again.log)} - {16} == {12, 20, 24}


def test_a_signal_in_the_last_batch_leaves_the_end_of_the_training_to_the_next_start(job, straight):
    broken = job.run(*STEPS, "--kill-at", "23", "--kill", "TERM", grace_s=GRACE_S)
    assert broken.statuses == [1] and steps(broken.log)[-1] == 24 and len(job.versions()) == 2, broken.log
    again = job.run(*STEPS)
    assert again.statuses == [0] and again.results[0]["started_at"] == 24, again.log
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])
    assert job.versions() == []


@pytest.mark.parametrize("form", ["agent", "library"])
def test_a_graceful_exit_by_an_exception_of_lightnings_own_keeps_the_versions(job, plain_job, form):
    # what a timer does that wants the next start to go on; Lightning does not let it out of fit
    chosen = {"agent": job, "library": plain_job}[form]
    argv = ("--library", str(chosen.base), "--every", "3") if form == "library" else ()
    stopped = chosen.run(*STEPS, *argv, "--kill-at", "10", "--kill", "EXIT")
    assert stopped.statuses == [0] and stopped.results[0]["step"] == 10, stopped.log
    assert len(chosen.versions()) == 2
