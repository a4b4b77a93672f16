"""The library form with NeMo 2.0, as its guide has it: the recipe imports it, no agent is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.adapter.lightning.support import steps
from tests.adapter.nemo.test_agent import exact
from tests.adapter.nemo.test_context import modes

pytestmark = pytest.mark.multiprocess


def library(job) -> tuple[str, ...]:
    return ("--library", str(job.base))


@pytest.mark.parametrize("how", [("--library-sync",), ("--async-save",)], ids=["sync", "async"])
def test_a_killed_run_goes_on_from_the_path_that_auto_resume_gives(plain_job, straight, how):
    argv = ("--steps", "8", "--distributed-optimizer", *how)
    durable = ("--durable-every", "4", "--resume", "--context")
    mixed = (*argv, *library(plain_job), *durable, "--always-save-context")
    killed = plain_job.run(*mixed, "--kill-at", "7", ranks=2)
    assert killed.statuses[0] == -9
    assert [steps(log) for log in killed.logs] == [[2, 6], [2, 6]], "step 4 is left to ModelCheckpoint"
    contexts = sorted(path.parent.parent.name for path in plain_job.base.glob("step-*_ckpt/context/io.json"))
    assert contexts == ["step-2_ckpt", "step-6_ckpt"]
    assert "mlflashpoint" not in (plain_job.base / "step-6_ckpt" / "context" / "io.json").read_text()
    # some of the names are drawn by chance
    originals = [modes(folder) for folder in plain_job.folder.glob("run/checkpoints/*/context")]
    found = modes(plain_job.base / "step-6_ckpt" / "context")
    assert found["io.json"] == originals[0]["io.json"]
    assert set(found.values()) == {mode for original in originals for mode in original.values()}
    again = plain_job.run(*mixed, ranks=2)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [6, 6]
    assert again.results[0]["ckpt_path"] == f"{plain_job.base}/step-6_ckpt"
    assert again.results[0]["io"].startswith("MLFlashpoint")
    assert exact(again.results) == exact(straight("--steps", "8", "--distributed-optimizer", ranks=2))
    left = [path for path in plain_job.base.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert left == [], "versions and context files are gone after a good end"


def test_durable_checkpoints_of_the_wrapped_trainer_are_loaded_by_a_job_without_us(plain_job, nemo_plain):
    argv = ("--steps", "4", "--durable-every", "4", "--context")
    assert plain_job.run(*argv, *library(plain_job)).statuses == [0]
    found = [path for path in plain_job.folder.rglob("*") if path.is_file() and b"mlflashpoint" in path.read_bytes()]
    assert [path for path in found if path.suffix not in (".txt", ".log")] == []
    again = nemo_plain.run(["--dir", str(plain_job.folder), "--steps", "6", "--durable-every", "9", "--resume"])
    assert again.statuses == [0], again.log
    assert again.results[0]["started_at"] == 4 and again.results[0]["ours"] == []
    assert Path(again.results[0]["ckpt_path"]).name == "weights"


def test_a_changed_model_is_refused_by_the_names_of_its_tensors(plain_job):
    assert plain_job.run(*library(plain_job), "--kill-at", "5").statuses == [-9]
    assert not list(plain_job.base.glob("step-*_ckpt")), "context files are there only if they are asked for"
    changed = plain_job.run(*library(plain_job), "--hidden", "32", "--resume")
    assert changed.statuses == [1]
    assert re.search(r"StateMismatchError: .*embedding\.\S+ is \[\d+, 64\] in the store, \[\d+, 32\]", changed.log)


def test_content_metadata_survives_and_a_path_routes_a_save_and_a_load(nemo_plain):
    outcome = nemo_plain.run(["--inside", "routes_by_path"], ranks=2, environ={"MLFLASHPOINT_JOB_ID": "job"})
    assert outcome.statuses == [0, 0], outcome.log
