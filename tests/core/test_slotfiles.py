import os

import pytest
import torch

from mlflashpoint.core.arena import Arena, file_of, scan_seat
from mlflashpoint.errors import ContainerError, ShardFormatError
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
