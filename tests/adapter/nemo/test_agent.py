"""NeMo 2.0 under the agent, no recipe change: a real GPT under MegatronStrategy, killed and started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlflashpoint.core.reader import ShardReader
from tests.adapter.lightning.support import clean, observed, saves, steps

pytestmark = pytest.mark.multiprocess

#: what has to be equal, to the bit, between a run that was killed and one that was not
EXACT = ("step", "weights", "optimizer", "states")


def content_metadata(job) -> list[dict]:
    """What the strategy has told about the layout of each shard in memory."""
    readers = [ShardReader.open(commit.with_suffix("")) for commit in job.versions()]
    found = [reader.attributes["content_metadata"] for reader in readers]
    for reader in readers:
        reader.close()
    return found


def exact(results: list[dict]) -> list[dict]:
    return [{name: result[name] for name in EXACT} for result in results]


@pytest.mark.parametrize(
    ("argv", "ranks", "sharding"),
    [
        ((), 1, None),
        (("--tp", "2"), 2, None),
        (("--distributed-optimizer",), 2, "dp_reshardable"),
        (("--distributed-optimizer", "--fully-reshardable"), 2, "fully_reshardable"),
    ],
    ids=["one rank", "tensor parallel", "distributed optimizer", "fully reshardable optimizer"],
)
def test_a_killed_run_goes_on_from_memory_on_all_ranks_and_ends_as_the_straight_run(
    job, straight, argv, ranks, sharding
):
    killed = job.run(*argv, "--kill-at", "5", "--kill-rank", str(ranks - 1), ranks=ranks)
    assert killed.statuses[-1] == -9
    assert [steps(log) for log in killed.logs] == [[2, 4]] * ranks
    assert [one.get("distrib_optim_sharding_type") for one in content_metadata(job)] == [sharding] * 2 * ranks
    again = job.run(*argv, ranks=ranks)
    assert again.statuses == [0] * ranks, again.log
    assert [result["started_at"] for result in again.results] == [4] * ranks
    assert exact(again.results) == exact(straight(*argv, ranks=ranks))
    assert again.results[0]["consumed"] == straight(*argv, ranks=ranks)[0]["consumed"][4:]
    assert job.versions() == []


@pytest.mark.parametrize(("how", "victim"), [("TERM", "-1"), ("RAISE", "1")])
def test_what_breaks_a_fit_off_ends_the_job_at_once_and_keeps_the_versions(job, straight, how, victim):
    argv = ("--steps", "8", "--distributed-optimizer")
    broken = job.run(*argv, "--kill-at", "5", "--kill", how, "--kill-rank", victim, ranks=2, grace_s=30)
    assert 0 not in broken.statuses and -9 not in broken.statuses, broken.log
    assert len(job.versions()) == 4, "two of each rank"
    again = job.run(*argv, ranks=2)
    assert again.statuses == [0, 0], again.log
    # a signal lets the batch in which it comes be trained to its end
    assert {result["started_at"] for result in again.results} == {6 if how == "TERM" else 4}
    assert exact(again.results) == exact(straight(*argv, ranks=2))
    assert job.versions() == []


def test_what_sigterm_drains_serves_when_all_memory_is_lost(job, straight, tmp_path):
    argv = ("--steps", "8", "--distributed-optimizer")
    ending = ("--kill-at", "5", "--kill", "TERM", "--kill-rank", "-1")
    broken = job.run(*argv, *ending, ranks=2, grace_s=30, drain_dir=tmp_path / "drain")
    assert 0 not in broken.statuses and -9 not in broken.statuses, broken.log
    clean(job.base)
    again = job.run(*argv, ranks=2, drain_dir=tmp_path / "drain")
    assert again.statuses == [0, 0], again.log
    # the signal lets the batch in which it comes be trained to its end, and that may be saved before the drain or after
    (start,) = {result["started_at"] for result in again.results}
    assert start in (4, 6) and f"going on from the drain directory, step {start}" in again.logs[0]
    assert exact(again.results) == exact(straight(*argv, ranks=2))


@pytest.mark.parametrize("how", [(), ("--async-save",)], ids=["sync", "async"])
def test_durable_saves_and_auto_resume_work_as_ever_and_the_newer_of_the_two_wins(job, straight, how):
    argv = ("--steps", "8", "--durable-every", "4", "--resume", "--distributed-optimizer", *how)
    killed = job.run(*argv, "--kill-at", "7", ranks=2)
    assert killed.statuses[0] == -9
    assert [steps(log) for log in killed.logs] == [[2, 6], [2, 6]], "step 4 is left to ModelCheckpoint"
    assert {line["step"] for line in observed(killed.log)} == {4}
    again = job.run(*argv, ranks=2)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [6, 6]
    # the kill may have interrupted the asynchronous save of step 4: NeMo alone would then refuse to go on
    assert re.search(r"going on from memory, step 6, not from \S*step=3-last\S* (of step 4|\(unfinished\))", again.log)
    plain = straight("--steps", "8", "--distributed-optimizer", ranks=2)
    assert exact(again.results) == exact(plain)
    names = sorted(path.name for path in (job.folder / "run" / "checkpoints").iterdir())
    # NeMo counts from 0 in these names
    assert names[-2:] == ["step=7", "step=7-last"] and names[:-2] in ([], ["step=3"])


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["nobody", "AutoResume"])
def test_steps_that_are_all_left_to_files_are_told_unless_auto_resume_looks_for_them(job, resume):
    outcome = job.run("--durable-every", "2", *resume)
    assert outcome.statuses == [0] and steps(outcome.log) == [], outcome.log
    assert outcome.log.count("were left to the recipe's own checkpoints") == (0 if resume else 1), outcome.log


def test_the_last_durable_checkpoint_is_made_by_a_job_that_goes_on_from_the_last_step(job, straight):
    argv = ("--durable-every", "4", "--resume", "--distributed-optimizer")
    killed = job.run(*argv, "--kill-end", ranks=2)
    assert -9 in killed.statuses and [steps(log) for log in killed.logs] == [[2, 6]] * 2, killed.log
    again = job.run(*argv, ranks=2)
    assert again.statuses == [0, 0] and again.results[0]["started_at"] == 6, again.log
    expected = straight(*argv, ranks=2)
    assert exact(again.results) == exact(expected)
    assert again.results[0]["files"] == expected[0]["files"] and "step=5-last" in expected[0]["files"]
    assert job.versions() == []


def test_durable_checkpoints_without_an_optimizer_are_no_reason_to_skip_a_memory_save_which_has_it(job, straight):
    argv = ("--no-save-optimizer", "--durable-every", "4")
    killed = job.run(*argv, "--kill-at", "5")
    assert killed.statuses == [-9] and steps(killed.log) == [2, 4], killed.log
    again = job.run(*argv)
    assert again.statuses == [0] and again.results[0]["started_at"] == 4, again.log
    assert exact(again.results) == exact(straight())


def test_a_durable_checkpoint_newer_than_memory_wins(job):
    argv = ("--steps", "8", "--durable-every", "4", "--resume")
    assert job.run(*argv, "--kill-at", "5", save_every_n_steps=3).statuses == [-9]
    again = job.run(*argv, save_every_n_steps=3)
    assert again.results[0]["started_at"] == 4
    assert "the durable checkpoint of step 4 is newer" in again.log


def test_memory_wins_over_a_newer_durable_checkpoint_that_cannot_be_read(job):
    argv = ("--steps", "8", "--durable-every", "4", "--resume")
    assert job.run(*argv, "--kill-at", "5", save_every_n_steps=3).statuses == [-9]
    for shard in (job.folder / "run" / "checkpoints").glob("*/weights/*.distcp"):
        shard.unlink()
    again = job.run(*argv, save_every_n_steps=3)
    assert again.statuses == [0] and again.results[0]["started_at"] == 3, again.log
    assert re.search(r"WARNING \S+step=3-last\S* can't be read, .*going on from memory, step 3", again.log, re.DOTALL)


def test_a_memory_save_never_waits_for_a_slow_durable_one(job):
    argv = ("--steps", "12", "--durable-every", "3", "--async-save", "--slow-durable-s", "4")
    outcome = job.run(*argv, keep_on_success=1)
    assert outcome.statuses == [0], outcome.log
    assert steps(outcome.log) == [2, 4, 8, 10]
    first_durable = re.search("Successfully saved checkpoint from iteration", outcome.log).start()
    complete = [int(found) for found in re.findall(r"step (\d+) is complete on all ranks", outcome.log[:first_durable])]
    assert complete[:2] == [2, 4], "step 4 is complete before the durable save of step 3 is"
    assert all(save["blocking_ms"] < 2000 for save in saves(outcome.log))


def test_a_changed_model_is_refused_by_the_names_of_its_tensors(job):
    assert job.run("--kill-at", "5").statuses == [-9]
    changed = job.run("--hidden", "32")
    assert changed.statuses == [0] and changed.results[0]["started_at"] == 0
    assert re.search(r"embedding\.\S+ is \[\d+, 64\] in the store, \[\d+, 32\] in the model", changed.log)


def test_a_version_that_is_refused_where_a_durable_checkpoint_is_asked_for_too_is_told_once(job):
    argv = ("--durable-every", "3", "--resume")
    assert job.run(*argv, "--kill-at", "5").statuses == [-9]
    changed = job.run(*argv, "--hidden", "32")
    assert changed.statuses == [1], changed.log
    visible = [line for line in changed.log.splitlines() if not line.startswith("DEBUG")]
    assert len([line for line in visible if "the memory version of step 4 is not used" in line]) == 1, changed.log
    assert len([line for line in visible if "recovery: step 4" in line]) == 1, changed.log


def test_a_fresh_container_in_which_nemo_makes_its_log_folder_first_is_used(job):
    job.folder = job.base / "exp"
    argv = ("--durable-every", "3", "--resume")
    killed = job.run(*argv, "--kill-at", "5")
    assert killed.statuses == [-9] and steps(killed.log) == [2, 4], killed.log
    (error,) = [line for line in killed.log.splitlines() if line.startswith(("ERROR", "WARNING"))]
    assert "exp/run/checkpoints, lies in the base container" in error and "remedy" in error
    again = job.run(*argv)
    assert again.statuses == [0] and again.results[0]["started_at"] == 4, again.log
    assert (job.folder / "run" / "checkpoints").is_dir()


def test_a_fresh_container_in_which_a_logger_alone_has_its_folder_is_used(job):
    job.folder = job.base / "exp"
    assert steps(job.run().log) == [2, 4, 6]


def test_another_layout_is_refused_and_training_starts_anew(job):
    assert job.run("--tp", "2", "--kill-at", "5", ranks=2).statuses[0] == -9
    changed = job.run(ranks=2)
    assert changed.statuses == [0, 0], changed.log
    assert [result["started_at"] for result in changed.results] == [0, 0]
    assert "saved with layout 'nemo/megatron/tp2'" in changed.log


def test_weights_to_begin_with_are_not_loaded_again_by_a_job_that_goes_on_from_memory(job, plain_job):
    assert plain_job.run("--steps", "2", "--durable-every", "2").statuses == [0]
    weights = next((plain_job.folder / "run" / "checkpoints").glob("*last"))
    killed = job.run("--restore", str(weights), "--kill-at", "5")
    assert killed.statuses == [-9] and "Doing selective restore" in killed.log
    again = job.run("--restore", str(weights))
    assert again.statuses == [0] and again.results[0]["started_at"] == 4
    assert "Doing selective restore" not in again.log
    assert "the weights that training began with are not loaded again" in again.log


def test_a_model_that_is_transformed_after_the_resume_is_refused(job):
    outcome = job.run("--transform")
    assert outcome.statuses == [0], outcome.log
    assert "MegatronStrategy transforms the model (PEFT)" in outcome.log and steps(outcome.log) == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (("--ckpt-format", "fsdp_dtensor"), ("MegatronStrategy with save_ckpt_format='fsdp_dtensor'", "torch_dist")),
        (("--modelopt",), ("MegatronStrategy", "converted by ModelOpt", "the recipe's own checkpoints")),
    ],
    ids=["fsdp_dtensor", "ModelOpt"],
)
def test_a_state_that_is_saved_past_the_checkpoint_io_is_refused_by_name_and_training_goes_on(
    job, straight, how, words
):
    outcome = job.run(*how)
    assert outcome.statuses == [0] and steps(outcome.log) == [] and job.versions() == [], outcome.log
    errors = [line for line in outcome.log.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1 and all(word in errors[0] for word in words), errors
    assert exact(outcome.results) == exact(straight())


def test_durable_checkpoints_are_loaded_by_a_job_without_us(job, nemo_plain, straight):
    argv = ("--steps", "4", "--durable-every", "4", "--context")
    assert job.run(*argv).statuses == [0]
    found = [path for path in job.folder.rglob("*") if path.is_file() and b"mlflashpoint" in path.read_bytes()]
    # NeMo's own log files may quote what we have logged
    assert [path for path in found if path.suffix not in (".txt", ".log")] == []
    again = nemo_plain.run(["--dir", str(job.folder), "--steps", "6", "--durable-every", "9", "--resume"])
    assert again.statuses == [0], again.log
    assert again.results[0]["started_at"] == 4 and again.results[0]["ours"] == []
    assert Path(again.results[0]["ckpt_path"]).name == "weights"
