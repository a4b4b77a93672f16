"""When the end of a script's own ``async_save`` counts: as soon as the script can know of it, and once."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mlflashpoint.adapter.pytorch.script import saves
from mlflashpoint.adapter.pytorch.script.uploads import Uploads
from tests.adapter.pytorch.script.test_custody import Line, durable


@pytest.fixture
def late():
    """A future that has woken those who wait for it, and calls its callbacks a moment later, in another thread."""
    future, go = Future(), threading.Event()
    future.add_done_callback(lambda _: go.wait(20))
    ends = threading.Thread(target=future.set_result, args=(None,))
    yield SimpleNamespace(future=future, begin=ends.start, go_on=lambda: (go.set(), ends.join(20)))
    go.set()


def test_the_save_after_a_durable_one_that_has_ended_is_in_memory_only(tmp_path, monkeypatch, late):
    monkeypatch.setenv("MLFLASHPOINT_DCP_MODE", "replace")
    line = Line(tmp_path / "memory")
    stream = SimpleNamespace(
        number=1, runtime=SimpleNamespace(rank=0), custody=line.custody, journal=line.journal, uploads=Uploads()
    )
    paths = [tmp_path / "run" / f"step-{step}" for step in (1, 2, 3)]
    original = SimpleNamespace(using=lambda state: late.future)
    saves._durably(original, stream, paths[0], {}, {}, True, "token")
    assert not saves._decide(stream, paths[1])["alone"]
    durable(paths[0])
    late.begin()
    assert late.future.result(20) is None
    assert saves._decide(stream, paths[1])["alone"]
    late.go_on()
    assert saves._decide(stream, paths[2])["alone"]


def test_an_end_is_noted_once_and_not_while_something_is_decided(late):
    uploads, noted = Uploads(), []
    uploads.add(late.future, noted.append)
    with uploads.noted():
        late.begin()
        late.future.result(20)
        late.go_on_later = threading.Thread(target=late.go_on)
        late.go_on_later.start()
        late.go_on_later.join(0.2)
        assert noted == []
    late.go_on_later.join(20)
    with uploads.noted():
        assert noted == [late.future]


def test_a_future_that_has_ended_already_is_noted_at_once():
    uploads, noted, future = Uploads(), [], Future()
    future.set_result(None)
    uploads.add(future, noted.append)
    assert noted == [future]
