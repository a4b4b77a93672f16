"""What a script's load of a checkpoint in memory only says when memory can't be asked for it."""

from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.pytorch.script import calls, loads, marker
from mlflashpoint.adapter.pytorch.script.council import Outcome
from mlflashpoint.errors import PeerError

GROUP = "dcp-0123456789ab"


class Original:
    """DCP's load, which stumbles over the folder of a checkpoint in memory only."""

    error = None
    called = False

    def __call__(self):
        self.called = True
        raise CheckpointException("load", {})


class Stream:
    """A stream that can't be asked for a version."""

    broken = ""
    has_saved = False

    def find(self):
        raise PeerError("the ranks did not come together")


@pytest.fixture
def folder(tmp_path):
    """The folder of a checkpoint in memory only."""
    path = tmp_path / "step-4"
    path.mkdir()
    durable = str(tmp_path / "step-1")
    marker.write(path, marker.Marker(str(path), "job", GROUP, 3, "token", durable, 1, 0), path / "last-durable")
    return path


def load(folder):
    original = Original()
    with pytest.raises(PeerError, match=f"memory could not be reached.*{folder.parent}/step-1") as caught:
        loads.load(original, ({},), {"checkpoint_id": folder})
    assert original.error is caught.value
    return original


def test_without_a_stream_it_says_that_memory_could_not_be_reached(folder, monkeypatch):
    monkeypatch.setattr(loads, "stream_of", lambda *_: None)
    assert not load(folder).called


def test_after_the_ranks_have_given_up_it_says_so_too(folder, monkeypatch):
    monkeypatch.setattr(loads, "given_up", lambda: True)
    assert load(folder).called


def test_a_checkpoint_that_memory_can_not_be_asked_for_does_not_count_as_lost(folder, monkeypatch):
    monkeypatch.setattr(loads, "stream_of", lambda *_: Stream())
    load(folder)
    assert marker.read(folder) is not None


def test_a_rank_that_alone_does_not_find_the_version_lets_no_other_wait_for_it(folder, monkeypatch):
    told = []

    def hold(answer=lambda: None, *, trouble=""):
        told.append(trouble)
        return Outcome(rank=0, trouble=trouble) if trouble else Outcome(answer())

    monkeypatch.setattr(loads, "hold", hold)
    stream = SimpleNamespace(runtime=SimpleNamespace(rank=0), load=None)
    asked = calls.Request({}, folder, None, False)
    with pytest.raises(CheckpointException, match="does not find the version"):
        loads._from_memory(Original(), stream, asked, None, on_disk=False)
    assert told == ["it does not find the version in memory"]


def test_what_the_script_s_own_load_raises_of_a_durable_checkpoint_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(loads, "given_up", lambda: True)
    with pytest.raises(CheckpointException):
        loads.load(Original(), ({},), {"checkpoint_id": tmp_path})
