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
