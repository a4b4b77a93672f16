import os

import pytest
import torch

from mlflashpoint.core.arena import Arena, file_of, scan_seat
from mlflashpoint.core.orphans import free_slots
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import ContainerError, ShardFormatError
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import state
from tests.core.shard_helpers import save


@pytest.fixture
def saved(seat):
    arena, record = save(seat, {"w": torch.arange(5.0)}, step=3)
    return arena.slots[0].path, record


def test_a_scan_tells_what_each_slot_holds_and_changes_nothing(seat, saved):
    replicas = Arena(seat, prefix="replica")
    replicas.reserve(1, 100)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in seat.iterdir())
    found = {info.path.name: (info.record, info.problem, info.replica) for info in scan_seat(seat)}
    assert found == {"slot-0": (saved[1], None, False), "slot-1": (None, None, False), "replica-0": (None, None, True)}
    assert sorted((path.name, path.stat().st_mtime_ns) for path in seat.iterdir()) == before


def test_a_seat_that_is_not_there_holds_nothing(seat):
    assert scan_seat(seat / "seat-3") == []


def test_a_seat_that_can_not_be_read_is_named(seat):
    (seat / "seat-0").touch()
    with pytest.raises(ContainerError, match="seat-0"):
        scan_seat(seat / "seat-0")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda slot: file_of(slot, "index").unlink(), "index is missing"),
        (lambda slot: file_of(slot, "data").unlink(), "data is missing"),
        (lambda slot: os.truncate(file_of(slot, "data"), 19), "data has 19 bytes"),
        (lambda slot: file_of(slot, "index").write_bytes(b"{}"), "index has 2 bytes"),
        (lambda slot: file_of(slot, "commit").write_bytes(b""), "not JSON"),
        (lambda slot: file_of(slot, "commit").write_bytes(b"x" * (1 << 20)), "exceeds"),
        (lambda slot: file_of(slot, "commit").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR."), "not JSON"),
    ],
)
def test_a_copy_that_can_not_be_whole_has_a_problem(seat, saved, spoil, why):
    spoil(saved[0])
    (info,) = [info for info in scan_seat(seat) if info.path == saved[0]]
    assert isinstance(info.problem, ShardFormatError)
    assert why in str(info.problem) and "slot-0" in str(info.problem)


def test_left_overs_and_quarantined_records_are_no_copies(seat, saved):
    commit = file_of(saved[0], "commit")
    commit.rename(commit.with_suffix(".quarantined"))
    (seat / "slot-5.commit.tmp-1").touch()
    (seat / "slot-x.commit").touch()
    assert [(info.path.name, info.record) for info in scan_seat(seat)] == [("slot-0", None), ("slot-1", None)]


def full_folder(path):
    path.mkdir()
    (path / "theirs").write_text("kept")


STRANGERS = [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path), full_folder]
PLACES = ["slot-0.data", "slot-1.index", "slot-0.commit", "slot-2.data", "slot-0.commit.tmp-1", "replica-0.data"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", STRANGERS, ids=["folder", "fifo", "link", "full folder"])
def test_the_next_start_makes_a_slot_anew_in_whose_place_lies_no_file_and_saves_into_it(tmp_path, caplog, make, place):
    config = StoreConfig(job_id="job", base_container=tmp_path / "base", allow_non_tmpfs=True)
    started = [Runtime(config, rank=0, world_size=1, local_rank=0)]
    try:
        for step in (1, 2, 3):
            assert started[0].save(state(step, 0), step=step, wait=True).ok
        started[0].close()
        file = tmp_path / "base/default/seat-0" / place
        file.unlink(missing_ok=True)
        make(file)
        started.append(Runtime(config, rank=0, world_size=1, local_rank=0))
        for step in (11, 12, 13, 14):
            result = started[1].save(state(step, 0), step=step, wait=True)
            assert result.ok, result.error
        assert started[1].find_latest().step == 14
    finally:
        for runtime in started:
            runtime.close()
    (told,) = [text for text in caplog.messages if "is no file of the store" in text]
    assert str(file) in told
    kept = [path for path in file.parent.rglob("theirs") if path.read_text() == "kept"]
    assert len(kept) == (make is full_folder)
    assert all(str(path.parent) in told for path in kept)


@pytest.mark.parametrize("make", STRANGERS, ids=["folder", "fifo", "link", "full folder"])
def test_the_slots_of_a_seat_without_a_rank_are_freed_whatever_lies_in_their_places(seat, saved, make):
    data = file_of(saved[0], "data")
    data.unlink()
    make(data)
    assert free_slots(seat) > 0
    assert scan_seat(seat) == []
