"""Plain Lightning on one device under the agent, no recipe change; each test is about one behaviour of a real run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.adapter.lightning import support
from tests.adapter.lightning.support import exact, observed, steps

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")


def test_a_killed_run_goes_on_from_the_newest_memory_step_and_ends_as_the_straight_run(job, straight):
    killed = job.run(*STEPS, "--kill-at", "20")
    assert killed.statuses == [-9]
    assert steps(killed.log) == [3, 6, 9, 12, 15, 18]
    again = job.run(*STEPS)
    assert again.statuses == [0], again.log
    assert again.results[0]["started_at"] == 18
    assert again.results[0]["events"] == ["restored 18"]
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])
    assert "going on from memory, step 18, not from nothing" in again.log


def test_the_second_and_third_kill_are_survived_too(job, straight):
    assert job.run(*STEPS, "--kill-at", "8").statuses == [-9]
    second = job.run(*STEPS, "--kill-at", "14")
    assert second.statuses == [-9] and "step 6" in second.log
    third = job.run(*STEPS)
    assert third.results[0]["started_at"] == 12
    assert exact(third.results[0]) == exact(straight(*STEPS)[0])


@pytest.mark.parametrize("validate", [(), ("--validate-every", "4"), ("--validate-every", "16")], ids=["", "4", "16"])
@pytest.mark.parametrize("kill_at", [13, 17])
def test_a_kill_around_the_end_of_an_epoch_changes_nothing(job, straight, kill_at, validate):
    # an epoch has 16 batches; the kill is before and behind its end
    argv = (*STEPS, *validate)
    assert job.run(*argv, "--kill-at", str(kill_at), save_every_n_steps=4).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=4).results[0]
    (expected,) = straight(*argv)
    resumed = kill_at // 4 * 4
    assert exact(again) == exact(expected)
    # a validation that was due when the state was saved came behind the save, and is made now
    assert again["events"] == [f"restored {resumed}", *(e for e in expected["events"] if int(e.split()[1]) >= resumed)]
    validated = f"validated {resumed}" in again["events"]
    # the loggers go on with the step that is next, behind the row of that validation
    expected_steps = [step for step in expected["logged"] if step >= resumed]
    assert again["logged"] == ([resumed - 1] if validated else []) + expected_steps


EPOCHS = ("--steps", "-1", "--epochs", "3")


def test_a_kill_after_a_resume_at_the_end_of_an_epoch_changes_nothing(job, straight):
    # counted in epochs: a run that is counted in steps ends at the right one whatever its loops do
    assert job.run(*EPOCHS, "--kill-at", "16", save_every_n_steps=8).statuses == [-9]
    second = job.run(*EPOCHS, "--kill-at", "26", save_every_n_steps=8)
    assert second.statuses == [-9] and "going on from memory, step 16" in second.log
    third = job.run(*EPOCHS, save_every_n_steps=8).results[0]
    assert third["started_at"] == 24
    assert exact(third) == exact(straight(*EPOCHS)[0])


def test_the_epoch_after_a_resume_at_the_end_of_one_starts_like_any_other(job, straight, plain_job):
    argv = (*EPOCHS, "--durable-every", "24")
    assert job.run(*argv, "--kill-at", "17", save_every_n_steps=16).statuses == [-9]
    again = job.run(*argv, "--kill-at", "26", save_every_n_steps=16)
    assert again.statuses == [-9] and "going on from memory, step 16" in again.log
    # the durable checkpoints that such a run makes are as good as any
    last = job.run(*argv, "--ckpt-path", "last", save_every_n_steps=16).results[0]
    assert last["started_at"] == 24 and last["step"] == straight(*EPOCHS)[0]["step"]
    assert last["epochs"][-1:] == straight(*EPOCHS)[0]["epochs"][-1:] == [2]


def test_a_loader_without_a_position_gives_no_batch_more_after_a_resume_at_the_end_of_an_epoch(job):
    argv = (*EPOCHS, "--stateless")
    assert job.run(*argv, "--kill-at", "16", save_every_n_steps=16).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=16).results[0]
    assert again["started_at"] == 16 and again["step"] == 48


@pytest.mark.parametrize("kill_at", [16, 20])
def test_a_loader_that_has_given_its_last_batch_gives_the_next_epoch_all_of_its_own(job, straight, kill_at):
    argv = (*EPOCHS, "--passes")
    assert job.run(*argv, "--kill-at", str(kill_at), save_every_n_steps=16).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=16).results[0]
    assert again["started_at"] == 16 and exact(again) == exact(straight(*argv)[0])


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_a_recipe_that_asks_for_the_length_of_the_training_keeps_its_place_in_the_data(job, straight, accumulate):
    argv = (*EPOCHS, "--passes", "--schedule", "estimated", "--accumulate", accumulate)
    assert job.run(*argv, "--kill-at", "11").statuses == [-9]
    again = job.run(*argv).results[0]
    assert again["started_at"] == 9 and exact(again) == exact(straight(*argv)[0])


@pytest.mark.parametrize(
    ("part", "end"),
    [
        (("--limit", "7", "--passes"), 7),
        (("--limit", "0.25", "--passes"), 4),
        (("--overfit", "3", "--passes"), 3),
        # a loader that goes on where it is, whoever begins
        (("--limit", "5"), 5),
        (("--cycle", "--passes"), 16),
    ],
    ids=["limit", "fraction", "overfit", "goes on", "cycle"],
)
def test_the_epoch_after_a_resume_at_the_end_of_a_part_of_the_data_has_the_same_batches(job, straight, part, end):
    argv = (*EPOCHS, *part)
    assert job.run(*argv, "--kill-at", str(end + 1), save_every_n_steps=end).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=end).results[0]
    assert again["started_at"] == end and exact(again) == exact(straight(*argv)[0])


@pytest.mark.parametrize("schedule", ["epoch", "plateau"])
def test_a_scheduler_that_counts_epochs_steps_once_in_the_epoch_of_the_resume(job, straight, schedule):
    argv = (*EPOCHS, "--schedule", schedule)
    assert job.run(*argv, "--kill-at", "20").statuses == [-9]
    again = job.run(*argv).results[0]
    assert again["started_at"] == 18 and again["lr"] == straight(*argv)[0]["lr"]
    assert exact(again) == exact(straight(*argv)[0])


def test_loops_callbacks_and_logged_steps_resume_as_lightning_resumes_from_a_file(job, plain_job):
    argv = ("--steps", "24", "--validate-every", "4")
    assert plain_job.run(*argv, "--durable-every", "18", "--kill-at", "20").statuses == [-9]
    from_file = plain_job.run(*argv, "--ckpt-path", str(plain_job.folder / "durable" / "step=18.ckpt")).results[0]
    assert job.run(*argv, "--kill-at", "20").statuses == [-9]
    from_memory = job.run(*argv).results[0]
    names = ("step", "epoch", "started_at", "lr", "count", "events", "callbacks")
    assert {name: from_memory[name] for name in names} == {name: from_file[name] for name in names}
    assert from_file["started_at"] == 18 and "validated 24" in from_file["events"]


def test_gradient_accumulation_counts_optimizer_steps(job, straight):
    argv = ("--steps", "12", "--accumulate", "2")
    killed = job.run(*argv, "--kill-at", "8")
    assert steps(killed.log) == [3, 6]
    again = job.run(*argv)
    assert again.results[0]["started_at"] == 6 and steps(again.log) == [9, 12]
    assert exact(again.results[0]) == exact(straight(*argv)[0])


def test_without_an_interval_nothing_of_ours_runs_and_the_run_is_the_same(job, straight):
    outcome = job.run(*STEPS, save_every_n_steps=None)
    assert exact(outcome.results[0]) == exact(straight(*STEPS)[0])
    assert not job.base.exists() and not any("core.runtime" in name for name in outcome.results[0]["ours"])


def test_saving_to_memory_changes_nothing_in_an_undisturbed_run(job, straight):
    outcome = job.run(*STEPS)
    assert exact(outcome.results[0]) == exact(straight(*STEPS)[0])
    assert outcome.results[0]["callbacks"] == straight(*STEPS)[0]["callbacks"]


def test_a_step_that_model_checkpoint_saves_is_left_to_it(job):
    outcome = job.run(*STEPS, "--durable-every", "6")
    assert steps(outcome.log) == [3, 9, 15, 21]
    # 2.4 writes last.ckpt at the end of the epoch too
    assert {line["step"] for line in observed(outcome.log)} - {16} == {6, 12, 18, 24}


def test_steps_of_two_model_checkpoints_in_turn_are_left_to_them(job):
    outcome = job.run(*STEPS, "--durable-every", "6", "--durable-also", "9")
    assert steps(outcome.log) == [3, 15, 21]
    assert "did not come" not in outcome.log


def test_a_checkpoint_that_the_recipe_names_and_that_is_not_there_is_no_fault_of_ours(job):
    outcome = job.run(*STEPS, "--ckpt-path", str(job.folder / "missing.ckpt"))
    assert outcome.statuses == [1] and "missing.ckpt" in outcome.log
    assert "ERROR" not in outcome.log and "fault" not in outcome.log, outcome.log


def test_skipping_durable_steps_can_be_turned_off(job):
    assert steps(job.run(*STEPS, "--durable-every", "6", skip_durable_steps=0).log) == [3, 6, 9, 12, 15, 18, 21, 24]


def test_the_save_at_the_end_of_an_epoch_is_foreseen(job):
    # an epoch has 16 batches; the last one ends with the training
    outcome = job.run(*STEPS, "--durable-epochs", "1", save_every_n_steps=4)
    assert steps(outcome.log) == [4, 8, 12, 20]
    assert {line["step"] for line in observed(outcome.log)} == {16, 24}


def test_a_save_of_weights_alone_is_no_durable_step(job):
    assert steps(job.run("--steps", "12", "--durable-every", "6", "--weights-only").log) == [3, 6, 9, 12]


def test_the_newer_memory_version_wins_over_the_ckpt_path_of_the_recipe(job, straight):
    argv = (*STEPS, "--durable-every", "10")
    assert job.run(*argv, "--kill-at", "17").statuses == [-9]
    path = job.folder / "durable" / "step=10.ckpt"
    again = job.run(*argv, "--ckpt-path", str(path))
    assert again.results[0]["started_at"] == 15
    assert f"going on from memory, step 15, not from {path} of step 10" in again.log
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


def test_the_newer_durable_checkpoint_wins_over_memory(job):
    argv = (*STEPS, "--durable-every", "10")
    assert job.run(*argv, "--kill-at", "11", save_every_n_steps=9).statuses == [-9]
    again = job.run(*argv, "--ckpt-path", "last", save_every_n_steps=9)
    assert again.results[0]["started_at"] == 10
    assert "the durable checkpoint of step 10 is newer" in again.log
    assert again.results[0]["ckpt_path"].endswith("last.ckpt")


def test_a_checkpoint_of_a_format_of_the_recipes_own_is_read_once_and_compared(job):
    argv = (*STEPS, "--durable-every", "10", "--io", "own")
    assert job.run(*argv, "--kill-at", "14").statuses == [-9]
    again = job.run(*argv, "--ckpt-path", "last")
    assert again.results[0]["started_at"] == 12
    assert [call for call in again.results[0]["calls"] if call.startswith("load")] == ["load last.ckpt"]


def test_a_durable_checkpoint_of_a_format_of_the_recipes_own_that_is_newer_is_not_read_twice(job):
    argv = (*STEPS, "--durable-every", "10", "--io", "own")
    assert job.run(*argv, "--kill-at", "11", save_every_n_steps=9).statuses == [-9]
    again = job.run(*argv, "--ckpt-path", "last", save_every_n_steps=9)
    assert again.results[0]["started_at"] == 10
    assert [call for call in again.results[0]["calls"] if call.startswith("load")] == ["load last.ckpt"]


@pytest.mark.parametrize("io", ["custom", "async"])
def test_checkpoint_io_of_the_recipe_sees_its_own_saves_alone(job, io):
    outcome = job.run("--steps", "12", "--durable-every", "6", "--io", io)
    assert outcome.results[0]["calls"] == ["save step=6.ckpt", "save last.ckpt", "save step=12.ckpt", "save last.ckpt"]
    assert steps(outcome.log) == [3, 9]


@pytest.mark.parametrize("io", ["custom", "async"])
def test_a_killed_run_with_a_checkpoint_io_of_the_recipes_own_goes_on_from_memory_past_it(job, straight, io):
    argv = (*STEPS, "--durable-every", "10", "--io", io)
    killed = job.run(*argv, "--kill-at", "17")
    assert killed.statuses == [-9] and steps(killed.log) == [3, 6, 9, 12, 15], killed.log
    path = job.folder / "durable" / "step=10.ckpt"
    again = job.run(*argv, "--ckpt-path", str(path))
    assert again.statuses == [0] and again.results[0]["started_at"] == 15, again.log
    assert f"going on from memory, step 15, not from {path} of step 10" in again.log
    assert set(again.results[0]["calls"]) == {"save step=20.ckpt", "save last.ckpt"}
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


@pytest.mark.parametrize(("how", "status"), [("RAISE", 1), ("TERM", 1)])
def test_an_error_or_sigterm_keeps_the_memory_versions(job, straight, how, status):
    broken = job.run(*STEPS, "--kill-at", "20", "--kill", how)
    assert broken.statuses == [status], broken.log
    assert len(job.versions()) == 2
    again = job.run(*STEPS)
    assert again.results[0]["started_at"] in (18, 21)
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


@pytest.mark.parametrize("how", ["RAISE", "TERM"])
def test_the_recipes_own_save_at_the_break_off_is_made_and_wins_as_the_newer_one(job, straight, how):
    broken = job.run(*STEPS, "--kill-at", "20", "--kill", how, "--on-exception")
    assert broken.statuses != [0]
    # Lightning takes it away when a training ends well.
    saved = shutil.copy(job.folder / "broken-off.ckpt", job.folder / "kept.ckpt")
    step = observed(broken.log)[-1]["step"]
    assert step in (20, 21)
    argv = (*STEPS, "--on-exception", "--ckpt-path", str(saved))
    again = job.run(*argv)
    assert again.results[0]["started_at"] == step
    # From its file Lightning trains the batch again in which the break came; memory of the same step has it done.
    assert exact(again.results[0]) in [exact(straight(*way)[0]) for way in (argv, STEPS)]


def test_a_resume_from_memory_goes_on_with_the_retention_of_model_checkpoint(job, straight):
    argv = (*STEPS, "--durable-every", "10", "--top-k", "1")
    assert job.run(*argv, "--kill-at", "17").statuses == [-9]
    assert sorted(path.name for path in (job.folder / "durable").iterdir()) == ["last.ckpt", "step=10.ckpt"]
    again = job.run(*argv)
    assert again.statuses == [0] and again.results[0]["started_at"] == 15
    # What it keeps is known from memory: the one before goes when the next is there.
    assert sorted(path.name for path in (job.folder / "durable").iterdir()) == ["last.ckpt", "step=20.ckpt"]
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


def test_a_good_end_removes_the_memory_versions_and_their_memory(job):
    assert job.run("--steps", "12").statuses == [0]
    assert sorted(path.name for path in job.base.rglob("*") if path.is_file() and path.stat().st_size > 4096) == []
    assert job.versions() == []


def test_a_good_end_keeps_the_memory_versions_if_told_to(job):
    assert job.run("--steps", "12", keep_on_success=1).statuses == [0]
    assert len(job.versions()) == 2


def test_durable_checkpoints_are_those_of_a_run_without_us_and_load_where_we_are_not_installed(job, plain_job, package):
    contents = []
    for one in (job, plain_job):
        assert one.run("--steps", "12", "--durable-every", "6").statuses == [0]
        files = sorted(path.name for path in (one.folder / "durable").iterdir())
        assert files == ["last.ckpt", "step=12.ckpt", "step=6.ckpt"]
        contents.append(_content_without_us(package, one.folder / "durable" / "step=12.ckpt", one.folder))
    assert contents[0] == contents[1]
    assert "'global_step': 12" in contents[0] and "'hyper_parameters'" in contents[0] and "'Watcher'" in contents[0]


def _content_without_us(package: str, checkpoint: Path, folder: Path) -> str:
    """All that the file holds, as a Python without mlflashpoint on its path sees it."""
    program = (
        "import sys\n"
        # An editable installation is found by a finder of its own.
        "sys.meta_path[:] = [f for f in sys.meta_path if 'mlflashpoint' not in getattr(f, '__module__', '')]\n"
        "import torch, importlib.util as u; assert u.find_spec('mlflashpoint') is None\n"
        "torch.set_printoptions(threshold=10**6, precision=10)\n"
        "sys.stdout.write(repr(torch.load(sys.argv[1], weights_only=False)))\n"
    )
    environ = support.environ(package, agent=False)
    environ["PYTHONPATH"] = environ["PYTHONPATH"].rpartition(":")[0]
    command = [str(support.PYTHON), "-c", program, str(checkpoint)]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=folder)
    assert found.returncode == 0, found.stderr
    return found.stdout.replace(str(folder), "")


@pytest.mark.parametrize(
    "search", [("--lr-find", "look"), ("--lr-find", "set"), ("--batch-size-find",)], ids=["look", "rate", "batch size"]
)
def test_a_search_at_the_start_of_a_training_is_made_once_and_what_it_has_found_stays(job, straight, search):
    argv = (*STEPS, *search)
    assert job.run(*argv, "--kill-at", "20").statuses == [-9]
    again = job.run(*argv)
    assert again.statuses == [0], again.log
    assert again.results[0]["started_at"] == 18 and again.log.count("going on from memory, step") == 1
    assert again.log.count("is left out: this fit goes on from memory") == 1
    (expected,) = straight(*argv)
    assert exact(again.results[0]) == exact(expected)
    assert [again.results[0][name] for name in ("rate", "batch_size")] == [expected["rate"], expected["batch_size"]]
    assert steps(again.log) == [21, 24]


def test_a_trial_run_neither_uses_nor_removes_what_is_in_memory(job):
    assert job.run("--steps", "12", "--kill-at", "8").statuses == [-9]
    trial = job.run("--steps", "12", "--fast-dev-run")
    assert trial.statuses == [0] and trial.results[0]["started_at"] == 0, trial.log
    assert job.run("--steps", "12").results[0]["started_at"] == 6


def test_both_packages_imported_make_one_save_per_step(package, tmp_path):
    also = "pytorch_lightning" if package == "lightning.pytorch" else "lightning"
    base = support.new_base()
    other = "pytorch_lightning" if package == "lightning.pytorch" else "lightning.pytorch"
    environ = {
        **support.environ(package, agent=True, also=also),
        "MLFLASHPOINT_SAVE_EVERY_N_STEPS": "3",
        "MLFLASHPOINT_BASE_CONTAINER": str(base),
    }
    program = f"import {other}, runpy; runpy.run_path({str(support.RECIPE)!r}, run_name='__main__')"
    places = ["--dir", str(tmp_path), "--out", str(tmp_path)]
    command = [str(support.PYTHON), "-m", "mlflashpoint.run", "-c", program, *places]
    try:
        found = subprocess.run(
            [*command, "--steps", "12", "--durable-every", "6"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        support.clean(base)
    assert found.returncode == 0, found.stderr
    assert steps(found.stderr) == [3, 9]
    assert [line["step"] for line in observed(found.stderr)] == [6, 6, 12, 12], "two files per step, each seen once"


@pytest.mark.parametrize(
    "check",
    [
        "a_batch_has_one_hook_of_ours_and_the_others_are_lightnings_own",
        "what_the_recipe_saves_into_the_container_is_its_own_and_not_durable",
        "a_fresh_container_with_the_recipes_own_folders_is_taken_and_one_with_others_is_not",
    ],
)
def test_inside(agent_zygote, check):
    outcome = agent_zygote.run(["--inside", check], environ={"MLFLASHPOINT_JOB_ID": "job"})
    assert outcome.statuses == [0], outcome.log
