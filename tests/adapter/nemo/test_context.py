"""NeMo's context files beside the versions, where the recipe has put files of its own."""

from __future__ import annotations

import os
from types import SimpleNamespace

from mlflashpoint.adapter.nemo.context import ContextFiles
from mlflashpoint.adapter.nemo.routing import Routing


def test_files_of_the_recipe_in_a_versions_folder_stay_and_its_context_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(ContextFiles, "_write", lambda self, folder: folder.mkdir(exist_ok=True))
    base = tmp_path / "job"
    (base / "step-2_ckpt" / "weights").mkdir(parents=True)
    (base / "step-4_ckpt").mkdir()
    (base / "step-4_ckpt" / "context").symlink_to("/somewhere/else")
    files = ContextFiles(Routing(base), SimpleNamespace(local_rank=0), "lightning")
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


def test_the_context_of_an_earlier_trainer_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(ContextFiles, "_write", lambda self, folder: folder.mkdir(exist_ok=True))
    files = ContextFiles(Routing(tmp_path), SimpleNamespace(local_rank=0), "lightning-2")
    (tmp_path / "step-2_ckpt").mkdir()
    (tmp_path / "step-2_ckpt" / "context").symlink_to("../step-context-lightning")
    files.begin(2)
    assert os.readlink(tmp_path / "step-2_ckpt" / "context") == "../step-context-lightning-2"
