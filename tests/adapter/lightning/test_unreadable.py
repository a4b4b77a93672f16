"""A checkpoint that the recipe names and that can't be read: memory wins if it has anything, on all ranks alike."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from tests.adapter.lightning.support import exact

pytestmark = pytest.mark.multiprocess

STEPS = ("--steps", "24")
DURABLE = ("--durable-every", "10")
DDP = ("--strategy", "ddp")


def garbage(path: Path) -> None:
    path.write_bytes(b"no checkpoint")


def no_checkpoint(path: Path) -> None:
    """It can be loaded, and is something else."""
    torch.save([1, 2], path)


def remove(path: Path) -> None:
    path.unlink()


def without_tensors(path: Path) -> None:
    """Its step can still be told, its tensors are gone."""
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist() if "/data/" not in name}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in kept.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("agent", remove),
        ("agent", no_checkpoint),
        ("agent", without_tensors),
        ("library", garbage),
    ],
)
def test_memory_wins_over_a_checkpoint_that_cannot_be_read_with_a_warning_that_says_why(
    job, plain_job, straight, form, damage
):
    chosen = {"agent": job, "library": plain_job}[form]
    path = chosen.folder / "durable" / "step=10.ckpt"
    argv = (*STEPS, *DURABLE, "--ckpt-path", str(path))
    if form == "library":
        argv = (*STEPS, *DURABLE, "--library", str(chosen.base), "--every", "9", "--library-durable", str(path))
    killed = chosen.run(*argv[:4], *argv[6:] if form == "agent" else argv[4:], "--kill-at", "11", save_every_n_steps=9)
    assert killed.statuses == [-9], killed.log
    damage(path)
    again = chosen.run(*argv, save_every_n_steps=9)
    assert again.statuses == [0] and again.results[0]["started_at"] == 9, again.log
    (warning,) = [line for line in again.log.splitlines() if line.startswith("WARNING") and "can't be read" in line]
    assert str(path) in warning and "memory, step 9" in warning
    assert exact(again.results[0]) == exact(straight(*STEPS)[0])


@pytest.mark.parametrize("damage", [without_tensors])
def test_without_a_version_in_memory_lightnings_own_error_comes_as_without_us(job, plain_job, damage):
    said = []
    for one in (job, plain_job):
        assert one.run("--steps", "2", "--durable-every", "2", save_every_n_steps=None).statuses == [0]
        path = one.folder / "durable" / "step=2.ckpt"
        damage(path)
        failed = one.run(*STEPS, *DURABLE, "--ckpt-path", str(path))
        assert failed.statuses == [1] and "mlflashpoint could not" not in failed.log and "ERROR" not in failed.log
        said.append(failed.log.splitlines()[-1].replace(str(one.folder), ""))
    assert said[0] == said[1]


def test_a_checkpoint_that_one_rank_alone_cannot_read_is_used_by_none(job, straight):
    argv = (*STEPS, *DDP, *DURABLE)
    assert -9 in job.run(*argv, "--kill-at", "11", ranks=2, save_every_n_steps=9).statuses
    folder = job.folder / "durable"
    (folder / "rank-0.ckpt").write_bytes((folder / "step=10.ckpt").read_bytes())
    again = job.run(*argv, "--ckpt-path", str(folder / "rank-{rank}.ckpt"), ranks=2, save_every_n_steps=9)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [9, 9]
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*argv[:4], ranks=2)]
    assert "another rank can't read it" in again.logs[0] and "FileNotFoundError" in again.logs[1]


@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_memory_wins_over_a_sharded_checkpoint_whose_shards_are_gone(job, straight, strategy):
    argv = (*STEPS, "--strategy", strategy)
    assert -9 in job.run(*argv, *DURABLE, "--kill-at", "11", ranks=2, save_every_n_steps=9).statuses
    path = job.folder / "durable" / "step=10.ckpt"
    for shard in path.glob("*.distcp"):
        shard.unlink()
    again = job.run(*argv, *DURABLE, "--ckpt-path", str(path), ranks=2, save_every_n_steps=9)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [9, 9] and "can't be read" in again.log
    assert [exact(result) for result in again.results] == [exact(result) for result in straight(*argv, ranks=2)]


def test_a_rank_that_is_short_of_memory_for_a_moment_is_waited_for_by_all(job):
    argv = (*STEPS, *DDP, *DURABLE, "--io", "own")
    assert -9 in job.run(*argv, "--kill-at", "11", ranks=2, save_every_n_steps=9).statuses
    path = job.folder / "durable" / "step=10.ckpt"
    failing = ("--load-fails", "1", "--load-fails-rank", "1")
    again = job.run(*argv, *failing, "--ckpt-path", str(path), ranks=2, save_every_n_steps=9)
    assert again.statuses == [0, 0], again.log
    assert [result["started_at"] for result in again.results] == [10, 10]
    assert "[Errno 12] Cannot allocate memory; all ranks try again in" in again.logs[1]
    assert "another rank could not; all ranks try again in" in again.logs[0]
    assert "can't be read" not in again.log
