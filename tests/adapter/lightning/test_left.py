"""Steps that are left to ModelCheckpoint: the recipe is told where nothing would ever go on from its files."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.multiprocess

#: every due step is one of ModelCheckpoint's too
STEPS = ("--steps", "12", "--durable-every", "3")
TOLD = re.compile(r"^WARNING\W.*left to the recipe's own checkpoints.*$", re.MULTILINE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_whose_due_steps_are_all_left_to_files_that_no_ckpt_path_names_is_told_so_once(job, ranks):
    argv = (*STEPS, "--strategy", "ddp") if ranks > 1 else STEPS
    outcome = job.run(*argv, ranks=ranks)
    assert outcome.statuses == [0] * ranks, outcome.log
    (told,) = TOLD.findall(outcome.log)
    assert "steps 3 and 6" in told and 'ckpt_path="last"' in told and "MLFLASHPOINT_SKIP_DURABLE_STEPS=0" in told


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        # Nothing has that name yet.
        ((*STEPS, "--ckpt-path", "last"), {}),
        ((*STEPS, "--durable-every", "6"), {}),
        (STEPS, {"skip_durable_steps": 0}),
    ],
    ids=["named", "in turn", "saved too"],
)
def test_a_fit_that_would_go_on_from_them_or_from_memory_is_told_nothing(job, argv, settings):
    outcome = job.run(*argv, **settings)
    assert outcome.statuses == [0] and TOLD.findall(outcome.log) == [], outcome.log


@pytest.mark.parametrize("durable", [False, True], ids=["nobody", "AutoResume"])
def test_the_library_form_tells_it_unless_an_auto_resume_finds_the_files(plain_job, durable):
    form = ("--library", str(plain_job.base), "--every", "3")
    found = ("--library-durable", str(plain_job.folder / "durable" / "last.ckpt")) if durable else ()
    outcome = plain_job.run(*STEPS, *form, *found)
    assert outcome.statuses == [0] and len(TOLD.findall(outcome.log)) == (0 if durable else 1), outcome.log


def test_a_start_with_nothing_in_memory_says_which_files_it_does_not_look_at(job):
    assert job.run(*STEPS, "--kill-at", "10").statuses == [-9]
    again = job.run(*STEPS)
    assert again.statuses == [0] and again.results[0]["started_at"] == 0, again.log
    line = "no version in memory to go on from, and no ckpt_path: files that the recipe has saved count only if"
    assert again.log.count(line) == 1, again.log
