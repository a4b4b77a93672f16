"""Lightning 2.5 under both names of its package: one whole flow each, killed and started again."""

from __future__ import annotations

import pytest

from tests.adapter.lightning import support
from tests.adapter.lightning.support import exact, steps
from tests.warm import Zygote

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")


@pytest.fixture(scope="module", params=list(support.BETWEEN))
def warm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("between")
    environ = support.environ(request.param, agent=True, overlay=support.BETWEEN[request.param])
    zygote = Zygote(support.PYTHON, support.RECIPE, environ, agent=True, folder=folder)
    yield zygote
    zygote.close()


@pytest.fixture
def new_job(warm, tmp_path):
    bases = []

    def new(name: str) -> support.Job:
        bases.append(support.new_base())
        return support.Job(warm, tmp_path / name, bases[-1])

    yield new
    for base in bases:
        support.clean(base)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_from_memory_and_ends_as_the_straight_run(new_job, ranks):
    argv = (*STEPS, "--strategy", "ddp") if ranks > 1 else STEPS
    straight = new_job("straight").run(*argv, ranks=ranks, save_every_n_steps=None)
    assert straight.statuses == [0] * ranks and straight.results[0]["release"].startswith("2.5."), straight.log
    job = new_job("killed")
    # an epoch has 16 batches
    assert -9 in job.run(*argv, "--kill-at", "17", ranks=ranks, save_every_n_steps=4).statuses
    second = job.run(*argv, "--kill-at", "22", ranks=ranks, save_every_n_steps=4)
    assert -9 in second.statuses and "going on from memory, step 16" in second.log, second.log
    again = job.run(*argv, ranks=ranks, save_every_n_steps=4)
    assert again.statuses == [0] * ranks, again.log
    assert [result["started_at"] for result in again.results] == [20] * ranks
    assert [exact(result) for result in again.results] == [exact(result) for result in straight.results]
    assert job.versions() == []


def test_a_validation_that_was_due_at_the_save_is_made_behind_the_resume(new_job):
    argv = ("--steps", "-1", "--epochs", "2", "--validate-every", "16", "--schedule", "score")
    straight = new_job("straight").run(*argv, save_every_n_steps=None).results[0]
    job = new_job("killed")
    assert job.run(*argv, "--kill-at", "17", save_every_n_steps=16).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=16)
    assert again.statuses == [0] and again.results[0]["started_at"] == 16, again.log
    assert exact(again.results[0]) == exact(straight) and again.results[0]["scores"] == straight["scores"]


@pytest.mark.parametrize(
    ("more", "every"), [(("--schedule", "estimated"), 9), (("--limit", "8"), 8)], ids=["estimated", "limit"]
)
def test_a_loader_that_can_be_resumed_gives_the_same_batches(new_job, more, every):
    argv = ("--steps", "-1", "--epochs", "2", "--passes", *more)
    straight = new_job("straight").run(*argv, save_every_n_steps=None).results[0]
    job = new_job("killed")
    assert job.run(*argv, "--kill-at", "10", save_every_n_steps=every).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=every).results[0]
    assert again["started_at"] == every and exact(again) == exact(straight)


def test_a_durable_checkpoint_is_left_alone_and_compared(new_job):
    argv = (*STEPS, "--durable-every", "10")
    job = new_job("mixed")
    killed = job.run(*argv, "--kill-at", "17")
    assert killed.statuses == [-9] and steps(killed.log) == [3, 6, 9, 12, 15]
    path = job.folder / "durable" / "step=10.ckpt"
    again = job.run(*argv, "--ckpt-path", str(path))
    assert again.statuses == [0] and again.results[0]["started_at"] == 15, again.log
    assert f"going on from memory, step 15, not from {path} of step 10" in again.log


def test_an_error_keeps_the_memory_versions(new_job):
    job = new_job("failed")
    assert job.run(*STEPS, "--kill-at", "8", "--kill", "RAISE").statuses == [1]
    assert len(job.versions()) == 2


def test_what_a_kill_behind_the_last_step_has_left_out_is_done(new_job):
    argv = ("--steps", "24", "--validate-every", "12", "--schedule", "score by steps", "--final")
    straight = new_job("straight").run(*argv, save_every_n_steps=None).results[0]
    job = new_job("killed")
    assert job.run(*argv, "--kill-validation", "24", save_every_n_steps=4).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=4)
    assert again.statuses == [0] and again.results[0]["started_at"] == 24, again.log
    found = again.results[0]
    assert exact(found) == exact(straight) and found["files"] == straight["files"]
    assert found["scores"] == [one for one in straight["scores"] if one[0] == 24]
