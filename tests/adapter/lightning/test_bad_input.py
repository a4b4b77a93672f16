"""What a Lightning recipe may ask for that can't be kept in memory: refused by name, and training goes on."""

from __future__ import annotations

import pytest

from tests.adapter.lightning.support import exact, saves, steps

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")


def test_a_changed_model_is_refused_by_the_names_of_its_tensors_and_training_starts_anew(job):
    assert job.run(*STEPS, "--kill-at", "8").statuses == [-9]
    changed = job.run(*STEPS, "--width", "16")
    assert changed.statuses == [0] and changed.results[0]["started_at"] == 0
    assert "net.0.weight is float32[8, 8] in the store, float32[16, 8] in the model" in changed.log


def test_an_object_that_may_not_be_stored_costs_that_save_alone(job):
    outcome = job.run("--steps", "12", "--foreign-at", "6", keep_on_success=1)
    assert outcome.statuses == [0]
    assert steps(outcome.log) == [3, 9, 12]
    failed = [save for save in saves(outcome.log) if not save["ok"]]
    assert [save["step"] for save in failed] == [6]
    assert "Foreign" in failed[0]["error"] and "foreign" in failed[0]["error"]
    (told,) = [line for line in outcome.log.splitlines() if "Foreign" in line and "remedy" in line]
    assert told.startswith("WARNING a save failed") and failed[0]["error"] in told


def test_hyperparameters_of_any_type_do_not_hinder_a_save(job, straight):
    assert job.run(*STEPS, "--foreign-hparams", "--kill-at", "8").statuses == [-9]
    again = job.run(*STEPS, "--foreign-hparams")
    assert again.results[0]["started_at"] == 6
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("strange", ("StrangeStrategy", "save_checkpoint")),
        ("deepspeed", ("DeepSpeedStrategy", "save_checkpoint")),
        ("xla", ("SingleDeviceXLAStrategy", "in no memory of their own")),
    ],
)
def test_a_strategy_whose_state_is_kept_its_own_way_is_refused_by_name_and_trains_on(job, straight, strategy, words):
    argv = ("--steps", "12", "--strategy", strategy)
    outcome = job.run(*argv)
    assert exact(outcome.results[0]) == exact(straight(*argv)[0])
    (error,) = [line for line in outcome.log.splitlines() if line.startswith("ERROR")]
    assert all(word in error for word in ("no memory checkpoints for this fit", *words, "remedy"))
    assert not saves(outcome.log)


def test_a_container_that_cannot_be_used_costs_the_memory_saves_alone(job, straight, tmp_path):
    outcome = job.run("--steps", "12", base_container=tmp_path / "on-disk")
    assert outcome.statuses == [0]
    assert exact(outcome.results[0]) == exact(straight("--steps", "12")[0])
    assert "not on tmpfs" in outcome.log and steps(outcome.log) == []
