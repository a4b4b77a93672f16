"""Reading the step of a durable checkpoint without executing what it holds."""

from __future__ import annotations

import os
import pickle
import zipfile

import pytest
import torch

fsspec = pytest.importorskip("fsspec")

from mlflashpoint.adapter.lightning import durable  # noqa: E402
from mlflashpoint.adapter.lightning.durable import checkpoint_step  # noqa: E402


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


def checkpoint(step: int, **more) -> dict:
    return {"epoch": 1, "global_step": step, "state_dict": {"w": torch.ones(3)}, **more}


@pytest.mark.parametrize("step", [0, 7, 255, 256, 65536, 2**31, 2**40])
def test_the_step_of_a_file_is_read_whatever_its_size(tmp_path, step):
    torch.save(checkpoint(step), tmp_path / "a.ckpt")
    assert checkpoint_step(tmp_path / "a.ckpt") == step
    assert checkpoint_step(f"file://{tmp_path}/a.ckpt") == step


def test_nothing_that_a_checkpoint_holds_is_executed(tmp_path):
    torch.save(checkpoint(7, trap=Trap(str(tmp_path / "sprung"))), tmp_path / "a.ckpt")
    assert checkpoint_step(tmp_path / "a.ckpt") == 7
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["meta.pt", "common.pt", "weights/common.pt"])
def test_the_step_of_a_folder_is_read_from_the_file_that_has_it(tmp_path, name):
    (tmp_path / "ckpt" / "weights").mkdir(parents=True)
    torch.save(checkpoint(9), tmp_path / "ckpt" / name)
    assert checkpoint_step(tmp_path / "ckpt") == 9


def test_what_hides_its_step_gives_none(tmp_path):
    torch.save(checkpoint(5), tmp_path / "old", _use_new_zipfile_serialization=False)
    torch.save({"global_step": "five"}, tmp_path / "text")
    torch.save({"epoch": 3}, tmp_path / "without")
    (tmp_path / "pickle").write_bytes(pickle.dumps(checkpoint(5)))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}q\x00garbage")
    for name in ("old", "text", "without", "pickle", "empty", "folder", "zip", "missing"):
        assert checkpoint_step(tmp_path / name) is None, name


def test_an_unfinished_checkpoint_is_distrusted_with_all_that_lies_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_unfinished", set())
    assert not durable.is_unfinished(tmp_path / "last")
    durable.distrust(tmp_path / "last")
    assert durable.is_unfinished(tmp_path / "last") and durable.is_unfinished(f"{tmp_path}/last/weights")
    assert not durable.is_unfinished(tmp_path / "last-2") and not durable.is_unfinished(None)
