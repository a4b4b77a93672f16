"""Jobs that die when their last step is in memory, and nothing behind it has been done yet."""

from __future__ import annotations

import re

import pytest

from tests.adapter.lightning.support import exact

pytestmark = pytest.mark.multiprocess

#: an epoch has 16 batches
STEPS = ("--steps", "24", "--final")
LEFT = re.compile(r"WARNING\W.*the memory versions are kept: .*state of step 20")


@pytest.mark.parametrize("library", [False, True], ids=["agent", "library"])
def test_a_fit_that_finds_nothing_to_train_keeps_what_only_memory_has(job, plain_job, straight, library):
    job = plain_job if library else job
    form = ("--library", str(job.base), "--every", "4") if library else ()
    assert job.run(*STEPS, *form, "--kill-at", "22", save_every_n_steps=4).statuses == [-9]
    kept = job.versions()
    over = job.run("--steps", "24", "--epochs", "1", *form, save_every_n_steps=4)
    assert over.statuses == [0] and over.results[0]["started_at"] == -1, over.log
    assert len(LEFT.findall(over.log)) == 1, over.log
    assert job.versions() == kept != []
    again = job.run(*STEPS, *form, save_every_n_steps=4)
    assert again.statuses == [0] and again.results[0]["started_at"] == 20, again.log
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])
    assert job.versions() == []


@pytest.mark.parametrize(
    ("steps", "kill", "more"),
    [
        # the last step lies within an epoch, or ends one
        (24, "train", ()),
        (32, "train", ("--schedule", "epoch")),
        (32, "epoch", ("--schedule", "mean", "--stateless")),
        (24, "validation", ("--best", "--validate-every", "12", "--schedule", "score by steps")),
    ],
)
def test_what_a_kill_behind_the_last_step_has_left_out_is_done(job, straight, steps, kill, more):
    argv = ("--steps", str(steps), "--final", *more)
    way = ("--kill-validation", str(steps)) if kill == "validation" else ("--kill-behind", kill)
    killed = job.run(*argv, *way, save_every_n_steps=4)
    assert killed.statuses == [-9] and "final.ckpt" not in str(list(job.folder.rglob("*.ckpt"))), killed.log
    again = job.run(*argv, save_every_n_steps=4)
    assert again.statuses == [0] and again.results[0]["started_at"] == steps, again.log
    found, expected = again.results[0], straight(*argv)[0]
    assert exact(found) == exact(expected)
    assert found["ended"] == expected["ended"][-2:] and found["files"] == expected["files"]
    assert found["scores"] == [one for one in expected["scores"] if one[0] == steps]
    assert found["best"] == expected["best"]
    assert job.versions() == []


@pytest.mark.parametrize("kill", ["epoch", "train", "validation"])
def test_what_a_kill_behind_the_last_epoch_has_left_out_is_done_and_memory_is_free(job, straight, kill):
    argv = ("--steps", "-1", "--epochs", "2", "--schedule", "mean", "--validate-every", "16")
    way = ("--kill-validation", "32") if kill == "validation" else ("--kill-behind", kill)
    assert job.run(*argv, *way, save_every_n_steps=4).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=4)
    assert again.statuses == [0] and again.results[0]["started_at"] == 32, again.log
    found, expected = again.results[0], straight(*argv)[0]
    assert exact(found) == exact(expected)
    assert found["ended"] == expected["ended"][-2:] and found["files"] == expected["files"]
    assert job.versions() == [] and "versions are kept" not in again.log


def test_ranks_end_the_training_together(plain_job, straight):
    argv = ("--steps", "16", "--strategy", "fsdp")
    form = ("--library", str(plain_job.base), "--every", "4")
    assert -9 in plain_job.run(*argv, *form, "--kill-behind", "epoch", ranks=2).statuses
    again = plain_job.run(*argv, *form, ranks=2)
    assert again.statuses == [0, 0], again.log
    expected = straight(*argv, ranks=2)
    assert [exact(found) for found in again.results] == [exact(one) for one in expected]
    assert [found["ended"] for found in again.results] == [one["ended"] for one in expected]
    assert plain_job.versions() == []


def test_a_training_that_cannot_be_ended_as_it_would_have_ended_is_kept_in_memory(job, straight):
    argv = ("--steps", "24", "--strategy", "ddp", "--final")
    assert -9 in job.run(*argv, "--kill-behind", "epoch", ranks=2, save_every_n_steps=4).statuses
    # another number of ranks: the means of the epoch are lost
    other = job.run("--steps", "24", "--final", save_every_n_steps=4)
    assert other.statuses == [0] and other.results[0]["ended"] == [] and "versions are kept" in other.log, other.log
    again = job.run(*argv, ranks=2, save_every_n_steps=4)
    assert again.statuses == [0, 0] and again.results[0]["files"] == straight(*argv, ranks=2)[0]["files"], again.log
    assert job.versions() == []


def test_what_a_durable_checkpoint_of_the_last_step_has_is_not_kept(job):
    argv = ("--steps", "24", "--durable-every", "24")
    killed = job.run(*argv, "--kill-behind", "epoch", save_every_n_steps=4, skip_durable_steps=0)
    assert killed.statuses == [-9] and job.versions() != [], killed.log
    path = job.folder / "durable" / "step=24.ckpt"
    again = job.run(*argv, "--ckpt-path", str(path), save_every_n_steps=4)
    assert again.statuses == [0] and again.results[0]["started_at"] == -1, again.log
    assert job.versions() == [] and "versions are kept" not in again.log
