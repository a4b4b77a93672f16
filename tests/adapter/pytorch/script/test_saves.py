"""Whether all ranks see the folder of a checkpoint in memory only, and what becomes of the save if not."""

import logging
import os
from types import SimpleNamespace

import pytest

from mlflashpoint.adapter.pytorch.script import marker, saves, streams
from mlflashpoint.adapter.pytorch.script.council import Outcome

GROUP = "dcp-0123456789ab"


class Stream:
    """Rank 0's, of a job of two ranks."""

    def __init__(self):
        self.runtime = SimpleNamespace(rank=0, world_size=2)
        self.custody = self
        self.number, self.warned, self.folders_are_shared, self.newest_is_memory = 0, False, False, False
        self.unseen, self.turned = None, []

    def save(self, *args, **kwargs):
        return "metadata"

    def show(self, path, number, token):
        path.mkdir(parents=True)
        marker.write(path, marker.Marker(str(path), "job", GROUP, number, token, "step-1", 1, 0), path / "last-durable")

    def turn(self, path, problem):
        self.turned.append(path.name)


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def save(stream, tmp_path, monkeypatch):
    """Saves to a folder; the other rank sees it or not."""
    monkeypatch.setattr(saves, "_SEEN_S", 0.2)

    def save(name, seen):
        answers = iter([Outcome(True), Outcome() if seen else Outcome(rank=1, trouble="rank 1 does not see it")])

        def hold(answer=lambda: None, **_):
            answer()
            return next(answers)

        monkeypatch.setattr(saves, "hold", hold)
        return saves._to_memory_alone(stream, SimpleNamespace(path=tmp_path / name, planner=None), {}, "token")

    return save


def test_one_folder_that_a_rank_does_not_see_makes_that_save_durable_and_no_other(stream, save):
    assert save("step-2", seen=False) is None
    assert save("step-3", seen=True) == "metadata"
    assert not stream.turned
    assert stream.folders_are_shared


def test_a_second_folder_that_a_rank_does_not_see_makes_all_saves_durable(stream, save):
    assert save("step-2", seen=False) is None
    assert save("step-3", seen=False) is None
    assert stream.turned == ["step-3"]


def test_a_save_is_said_to_be_in_memory_only_once_it_is(save, caplog):
    caplog.set_level(logging.INFO, "mlflashpoint.adapter")
    save("step-2", seen=False)
    assert "is in memory only" not in caplog.text
    save("step-3", seen=True)
    assert "step-3 is in memory only" in caplog.text


def test_folders_are_opened_before_a_name_in_them_is_looked_for(tmp_path, monkeypatch):
    """A network file system believes until then that a name which was not there still is not."""
    opened = []
    scandir = os.scandir

    def scanned(folder):
        opened.append(folder)
        return scandir(folder)

    path = tmp_path / "step-2" / "model"
    Stream().show(path, 1, "token")
    read = marker.read
    monkeypatch.setattr(marker, "read", lambda folder: read(folder) if path.parent in opened else None)
    monkeypatch.setattr(saves.os, "scandir", scanned)
    assert saves._is_marked(path, "token")
    assert opened == [tmp_path, path.parent]


def test_a_store_that_can_not_be_opened_is_told_once_with_its_remedy(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(streams, "_connected", lambda stream: stream is not None)
    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setenv("MLFLASHPOINT_JOB_ID", "job")
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MLFLASHPOINT_BASE_CONTAINER", str(tmp_path / "file"))
    monkeypatch.setenv("MLFLASHPOINT_ALLOW_NON_TMPFS", "1")
    assert streams.stream_of("told-once", tmp_path / "step-1", True) is None
    errors = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert ["remedy" in error for error in errors] == [True, False], errors
    assert "step-1 do not go to memory: the base container is not a folder" in errors[1]
