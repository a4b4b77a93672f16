"""NeMo's context files beside the versions, where the recipe has put files of its own."""

from __future__ import annotations

import gc
import os
import stat
import sys
import weakref
from types import ModuleType

import pytest

from mlflashpoint.adapter.nemo.context import ContextFiles
from mlflashpoint.adapter.nemo.routing import Routing


class Trainer:
    local_rank = 0


@pytest.fixture
def trainer():
    return Trainer()


def test_files_of_the_recipe_in_a_versions_folder_stay_and_its_context_is_not_replaced(tmp_path, monkeypatch, trainer):
    monkeypatch.setattr(ContextFiles, "_write", lambda self, trainer, folder: folder.mkdir(exist_ok=True))
    base = tmp_path / "job"
    (base / "step-2_ckpt" / "weights").mkdir(parents=True)
    (base / "step-4_ckpt").mkdir()
    (base / "step-4_ckpt" / "context").symlink_to("/somewhere/else")
    files = ContextFiles(Routing(base), trainer, "lightning")
    files.begin(None)
    for step in range(2, 20, 2):
        files.add(step)
    files.remove()
    assert sorted(str(path.relative_to(base)) for path in base.rglob("*")) == [
        "step-2_ckpt",
        "step-2_ckpt/weights",
        "step-4_ckpt",
        "step-4_ckpt/context",
    ]
    assert os.readlink(base / "step-4_ckpt" / "context") == "/somewhere/else"


def test_the_context_of_an_earlier_trainer_is_replaced(tmp_path, monkeypatch, trainer):
    monkeypatch.setattr(ContextFiles, "_write", lambda self, trainer, folder: folder.mkdir(exist_ok=True))
    files = ContextFiles(Routing(tmp_path), trainer, "lightning-2")
    (tmp_path / "step-2_ckpt").mkdir()
    (tmp_path / "step-2_ckpt" / "context").symlink_to("../step-context-lightning")
    files.begin(2)
    assert os.readlink(tmp_path / "step-2_ckpt" / "context") == "../step-context-lightning-2"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_files_have_the_modes_that_nemo_gives_them_anywhere(tmp_path, monkeypatch, trainer, umask):
    class TrainerContext:
        """NeMo's, which writes JSON, and YAML beside it."""

        @classmethod
        def from_trainer(cls, trainer):
            return cls()

        def io_dump(self, folder, yaml_attrs):
            (folder / "artifacts").mkdir(parents=True)
            (folder / "io.json").write_text("{}")
            (folder / "artifacts" / "vocabulary").write_text("a b")

    module = ModuleType("nemo.lightning.io.pl")
    module.TrainerContext = TrainerContext
    for name in ("nemo", "nemo.lightning", "nemo.lightning.io"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    base = tmp_path / "job"
    base.mkdir()
    before = os.umask(umask)
    try:
        files = ContextFiles(Routing(base), trainer, "lightning")
        files.begin(None)
        files.add(2)
        TrainerContext().io_dump(tmp_path / "original", ["model"])
    finally:
        os.umask(before)
    assert modes(base / "step-2_ckpt" / "context") == modes(tmp_path / "original")
    # the folder above is what NeMo would have made for its checkpoint
    assert stat.S_IMODE((base / "step-2_ckpt").stat().st_mode) == 0o777 & ~umask


def modes(folder) -> dict[str, int]:
    root = folder.resolve()
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}


def test_the_files_do_not_keep_their_trainer_alive(tmp_path):
    trainer = Trainer()
    held, files = weakref.ref(trainer), ContextFiles(Routing(tmp_path), trainer, "lightning")
    del trainer
    gc.collect()
    assert held() is None
    files.begin(None)
    files.remove()
