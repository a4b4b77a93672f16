"""A script in plain PyTorch under the agent, killed with SIGKILL and started again; by torchrun where it says so."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.adapter.pytorch.launch import ROOT
from tests.adapter.pytorch.script.jobs import Job, resumed_as

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def job(tmp_path, warm):
    jobs = []

    def make(*, torchrun=False, **settings):
        jobs.append(Job(tmp_path, warm=None if torchrun else warm, **settings))
        return jobs[-1]

    yield make
    for made in jobs:
        made.close()


@pytest.fixture(scope="module")
def straight(tmp_path_factory, warm):
    """Kind of script -> reports of its unbroken run without the agent, and the bytes that it left."""
    found = {}

    def of(kind):
        if kind not in found:
            one = Job(tmp_path_factory.mktemp(kind), warm=warm, ranks=1 if kind == "single" else 2)
            reports = one.start("--kind", kind, "--steps", 8, agent=False)
            found[kind] = reports, content(one.checkpoints)
        return found[kind]

    return of


def content(folder):
    """Names of all files, and the bytes of those that hold data (metadata holds an id of its own for each save)."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.name == ".metadata" or path.read_bytes() for path in files}


def is_memory_only(folder):
    return (folder / "mlflashpoint.json").exists()


def test_the_newest_torch(job):
    """Another release of torch, with the Python that the Megatron Bridge tests use."""
    python = ROOT / ".envs" / "bridge" / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with another torch: run tools/envs/bridge.sh")
    one = job(torchrun=True, python=python, DCP_MODE="replace", DCP_DURABLE_EVERY_N_SAVES="3")
    unbroken = one.start("--steps", 6, "--every", 100, agent=False)
    one.start("--save", "process", "--steps", 6, "--die-after", 5, fails=True)
    assert is_memory_only(one.checkpoints / "step-5")
    assert resumed_as(unbroken, one.start("--save", "process", "--steps", 6)) == 5


@pytest.mark.parametrize(("kind", "save"), [("fsdp", "sync"), ("ddp", "sync"), ("ddp", "thread"), ("fsdp", "process")])
def test_augment_resumes_from_memory_and_leaves_the_durable_saves_as_they_are(job, straight, kind, save):
    reports, bytes_without_us = straight(kind)
    one = job(DCP_MODE="augment")
    one.start("--kind", kind, "--save", save, "--steps", 8, "--die-after", 4, fails=True)
    resumed = one.start("--kind", kind, "--save", save, "--steps", 8)
    assert resumed_as(reports, resumed) == 4
    assert one.log.count("step-4 is loaded from memory") == 1
    assert content(one.checkpoints) == bytes_without_us


def test_off_leaves_a_script_alone(job, straight):
    reports, bytes_without_us = straight("fsdp")
    # The mode is read as a process starts.
    one = job(torchrun=True, DCP_MODE="off")
    assert one.start("--steps", 8)[0]["digests"] == reports[0]["digests"]
    assert content(one.checkpoints) == bytes_without_us
    assert not one.memory.exists()


def test_one_process_without_a_process_group(job, straight):
    one = job(ranks=1, DCP_MODE="replace")
    one.start("--kind", "single", "--steps", 8, "--die-after", 4, fails=True)
    assert is_memory_only(one.checkpoints / "step-4")
    assert resumed_as(straight("single")[0], one.start("--kind", "single", "--steps", 8)) == 4
    assert not is_memory_only(one.checkpoints / "step-8")
    assert job(ranks=1).start("--kind", "single", "--steps", 8, agent=False)[0]["resumed"] == 8


@pytest.mark.parametrize(("kind", "save"), [("ddp", "thread"), ("fsdp", "process")])
def test_replace_resumes_from_a_checkpoint_in_memory_only_and_ends_with_a_durable_one(job, straight, kind, save):
    reports, _ = straight(kind)
    one = job(DCP_MODE="replace", DCP_DURABLE_EVERY_N_SAVES="3")
    one.start("--kind", kind, "--save", save, "--steps", 8, "--die-after", 5, fails=True)
    saved = {path.name: is_memory_only(path) for path in one.checkpoints.iterdir()}
    assert saved["step-5"] and not saved["step-1"]
    assert resumed_as(reports, one.start("--kind", kind, "--save", save, "--steps", 8)) == 5
    assert "step-5 is loaded from memory" in one.log
    # What a finished job leaves behind needs neither memory nor us.
    one.forget_memory()
    last = one.start("--kind", kind, "--steps", 8, agent=False)
    assert [report["resumed"] for report in last] == [8, 8]
    assert last[0]["digests"]["8"] == reports[0]["digests"]["8"]


@pytest.mark.parametrize(("mode", "from_drained"), [("replace", 1), ("augment", 0)])
def test_after_sigterm_has_drained_the_newest_checkpoint_is_there_though_all_memory_is_gone(
    job, straight, tmp_path, mode, from_drained
):
    one = job(DCP_MODE=mode, DRAIN_DIR=str(tmp_path / "drain"))
    one.start("--steps", 8, "--die-after", 5, "--die-by", "SIGTERM", fails=True)
    assert is_memory_only(one.checkpoints / "step-5") == (mode == "replace")
    one.forget_memory()
    assert resumed_as(straight("fsdp")[0], one.start("--steps", 8)) == 5
    assert one.log.count("step-5 is loaded from the drain directory") == from_drained
    assert "is loaded from memory" not in one.log


def test_every_nth_save_is_durable_over_a_restart(job):
    one = job(DCP_MODE="replace", DCP_DURABLE_EVERY_N_SAVES="4")
    one.start("--steps", 10, "--die-after", 3, fails=True)
    one.start("--steps", 10, "--die-after", 9, fails=True)
    durable = [step for step in range(1, 10) if not is_memory_only(one.checkpoints / f"step-{step}")]
    assert durable == [1, 5, 9]


def test_a_script_that_does_not_part_leaves_a_durable_checkpoint_too(job):
    one = job(DCP_MODE="replace")
    one.start("--steps", 3, "--end", "exit")
    assert [is_memory_only(one.checkpoints / f"step-{step}") for step in (1, 2, 3)] == [False, True, False]


def test_memory_lost_fails_once_with_the_last_durable_and_the_next_start_finds_it(job, straight):
    one = job(DCP_MODE="replace")
    # The script's own retention takes the last durable checkpoint for the oldest of three.
    one.start("--steps", 8, "--keep", 2, "--die-after", 4, fails=True)
    assert sorted(path.name for path in one.checkpoints.iterdir()) == ["step-3", "step-4"]
    one.forget_memory()
    one.start("--steps", 8, fails=True)
    assert one.log.count("NoVersionError: the checkpoint was in memory only") >= 2
    assert f"finds the last durable checkpoint {one.checkpoints}/step-1" in one.log
    assert sorted(path.name for path in one.checkpoints.iterdir()) == ["step-1"]
    assert resumed_as(straight("fsdp")[0], one.start("--steps", 8)) == 1


def test_without_us_a_checkpoint_in_memory_only_names_the_last_durable_one(job):
    one = job(DCP_MODE="replace")
    one.start("--steps", 8, "--die-after", 3, fails=True)
    one.start("--steps", 8, agent=False, fails=True)
    assert f"kept this checkpoint in memory only ({one.checkpoints}/step-3)" in one.log
    assert f"the last durable one is {one.checkpoints}/step-1" in one.log


def test_a_script_that_saves_under_one_name_resumes_from_memory_and_loses_nothing_with_it(job, straight):
    reports, _ = straight("fsdp")
    one = job(DCP_MODE="replace")
    one.start("--one-name", "--steps", 8, "--die-after", 4, fails=True)
    assert resumed_as(reports, one.start("--one-name", "--steps", 8, "--die-after", 6, fails=True)) == 4
    assert one.log.count("is loaded from memory") == 1
    one.forget_memory()
    assert resumed_as(reports, one.start("--one-name", "--steps", 8)) == 6


def test_a_checkpoint_that_somebody_else_has_written_is_loaded_from_disk(job, straight):
    reports, _ = straight("fsdp")
    one = job(DCP_MODE="augment")
    one.start("--one-name", "--steps", 8, "--die-after", 4, fails=True)
    one.start("--one-name", "--steps", 8, "--die-after", 6, fails=True, agent=False)
    assert resumed_as(reports, one.start("--one-name", "--steps", 8)) == 6
    assert "is loaded from memory" not in one.log


def test_model_and_optimizer_saved_apart(job, straight):
    one = job(DCP_MODE="replace")
    one.start("--apart", "--steps", 8, "--die-after", 4, fails=True)
    assert is_memory_only(one.checkpoints / "step-4" / "optimizer")
    assert resumed_as(straight("fsdp")[0], one.start("--apart", "--steps", 8)) == 4
    assert one.log.count("is loaded from memory") == 2


def test_a_memory_save_that_fails_on_one_rank_is_durable_on_all(job, straight):
    one = job(DCP_MODE="replace")
    one.start("--steps", 8, "--full-from", 1, "--die-after", 4, fails=True)
    assert "is saved durably, by all" in one.log
    saved = {path.name: is_memory_only(path) for path in one.checkpoints.iterdir()}
    assert saved == {f"step-{step}": False for step in (1, 2, 3, 4)}
    assert resumed_as(straight("fsdp")[0], one.start("--steps", 8)) == 4


def test_calls_from_frameworks_and_groups_of_their_own_are_left_alone(job):
    one = job(DCP_MODE="replace")
    one.start("--foreign")
    assert not any(is_memory_only(path) for path in one.checkpoints.iterdir())
    assert not list(one.memory.rglob("*.commit")) and 'kind": "memory' not in one.log


ROLLBACK = """
import shutil, sys, torch, torch.distributed.checkpoint as dcp
from pathlib import Path
folder, best = Path(sys.argv[1]) / "checkpoint", Path(sys.argv[1]) / "best"
state = {"w": torch.zeros(4), "step": 0}
for step in range(1, 6):
    state["step"] = step
    state["w"] += 1
    dcp.save(state, checkpoint_id=folder)
    if step == 2:
        shutil.copytree(folder, best)
shutil.rmtree(folder)
shutil.copytree(best, folder)
dcp.load(state, checkpoint_id=folder)
assert state["step"] == 2 and state["w"].tolist() == [2.0] * 4, state
"""


def test_a_script_that_puts_an_older_checkpoint_back_loads_that_one(tmp_path):
    base = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="mlf-test-"))
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MLFLASHPOINT_JOB_ID": "rollback",
        "MLFLASHPOINT_BASE_CONTAINER": str(base / "container"),
        "MLFLASHPOINT_DCP_MODE": "augment",
    }
    command = [sys.executable, "-W", "ignore", "-m", "mlflashpoint.run", "-c", ROLLBACK, str(tmp_path)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        held = any(base.rglob("*.commit"))
    finally:
        shutil.rmtree(base)
    assert done.returncode == 0 and held, done.stderr
