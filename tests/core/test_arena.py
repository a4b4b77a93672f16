import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from mlflashpoint.core import arena as arena_module
from mlflashpoint.core import mapping
from mlflashpoint.core.arena import Arena, file_of
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.saver import ShardSaver
from mlflashpoint.errors import ContainerError, ShardFormatError, StoreFullError
from tests.core.shard_helpers import differences, save

MIB = 1 << 20


def adopted(seat):
    arena = Arena(seat)
    arena.adopt()
    return arena


def test_slots_are_allocated_in_full_and_private_to_the_user(seat):
    arena = Arena(seat)
    arena.reserve(2, 5 * MIB)
    for slot in arena.slots:
        status = os.stat(slot.data_path)
        assert slot.capacity == status.st_size == 6 * MIB
        assert status.st_blocks * 512 >= 6 * MIB
        assert status.st_mode & 0o777 == 0o600
        assert slot.record is None and len(slot.buffer) == slot.bytes.numel() == 6 * MIB


def test_a_reservation_that_is_met_changes_nothing(seat):
    arena = Arena(seat)
    arena.reserve(2, MIB)
    before = [(slot.bytes.data_ptr(), os.stat(slot.data_path).st_ino) for slot in arena.slots]
    arena.reserve(2, MIB)
    arena.reserve(1, 2 * MIB)
    assert [(slot.bytes.data_ptr(), os.stat(slot.data_path).st_ino) for slot in arena.slots] == before


def test_the_slots_of_a_killed_predecessor_are_taken_over_as_they_are(seat):
    script = textwrap.dedent(
        f"""
        import os, signal, torch
        from pathlib import Path
        from tests.core.shard_helpers import save
        save(Path({str(seat)!r}), {{"w": torch.arange(1000.0)}}, step=7, slot=1)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    inodes = {path.name: os.stat(path).st_ino for path in seat.glob("*.data")}
    arena = adopted(seat)
    assert [slot.record and slot.record.step for slot in arena.slots] == [None, 7]
    arena.reserve(2, 1000)
    assert {path.name: os.stat(path).st_ino for path in seat.glob("*.data")} == inodes
    save(seat, {"w": torch.zeros(1000)}, step=8, slot=0, arena=arena)
    assert torch.equal(ShardReader.open(arena.slots[1].path).state()["w"], torch.arange(1000.0))


def test_a_slot_that_grows_keeps_what_it_holds(seat):
    saver = ShardSaver()
    arena, record = save(seat, {"w": torch.arange(300_000.0)}, step=1, saver=saver)
    large = {"w": torch.ones(3 * MIB)}
    old = arena.slots[0].buffer
    save(seat, large, step=2, slot=1, arena=arena, saver=saver)
    assert [slot.capacity for slot in arena.slots] == [12 * MIB, 12 * MIB]
    assert arena.slots[0].record == record
    reader = ShardReader.open(arena.slots[0].path)
    reader.verify()
    assert torch.equal(reader.state()["w"], torch.arange(300_000.0))
    # Who still held the mapping from before sees the same memory.
    arena.slots[0].buffer[0:2] = b"xy"
    assert bytes(old[0:2]) == b"xy"


def test_left_over_temporary_files_are_reaped_and_others_stay(seat):
    names = ["slot-0.index.tmp-ab", "slot-12.commit.tmp-", "slot-1.data.tmp-x"]
    others = ["replica-0.index.tmp-ab", "slot-0.quarantined", "notes.tmp-1", "slot-0.index"]
    for name in names + others:
        (seat / name).touch()
    adopted(seat)
    assert sorted(os.listdir(seat)) == sorted(others)


def test_slots_and_replicas_of_one_seat_do_not_meet(seat):
    Arena(seat).reserve(1, MIB)
    replicas = Arena(seat, prefix="replica")
    replicas.reserve(2, MIB)
    assert len(adopted(seat).slots) == 1
    again = Arena(seat, prefix="replica")
    assert [slot.path.name for slot in again.adopt()] == ["replica-0", "replica-1"]


def test_slots_are_taken_over_in_the_order_of_their_numbers(seat):
    for number in (10, 9, 2):
        mapping.allocate(seat / f"slot-{number}.data", 4096)
    arena = adopted(seat)
    assert [slot.path.name for slot in arena.slots] == ["slot-2", "slot-9", "slot-10"]
    arena.reserve(4, 4096)
    assert [slot.path.name for slot in arena.slots] == ["slot-2", "slot-9", "slot-10", "slot-0"]


def test_a_slot_whose_predecessor_died_while_making_it_is_used(seat):
    (seat / "slot-0.data").touch()
    arena = adopted(seat)
    assert arena.slots[0].capacity == 0
    save(seat, {"w": torch.ones(4)}, arena=arena)
    assert [slot.path.name for slot in arena.slots] == ["slot-0", "slot-1"]
    assert torch.equal(ShardReader.open(arena.slots[0].path).state()["w"], torch.ones(4))


def test_a_slot_with_holes_is_filled_when_it_is_taken_over(seat):
    with open(seat / "slot-0.data", "wb") as file:
        file.truncate(4 * MIB)
    adopted(seat)
    assert os.stat(seat / "slot-0.data").st_blocks * 512 == 4 * MIB


@pytest.mark.parametrize("spoil", ["index gone", "index short", "data short", "commit torn", "commit of the future"])
def test_a_slot_whose_record_can_not_be_believed_is_taken_for_empty(seat, spoil, caplog):
    arena, _ = save(seat, {"w": torch.ones(4)})
    index, commit = file_of(arena.slots[0].path, "index"), file_of(arena.slots[0].path, "commit")
    if spoil == "index gone":
        index.unlink()
    elif spoil == "index short":
        index.write_bytes(index.read_bytes()[:-1])
    elif spoil == "data short":
        commit.write_bytes(commit.read_bytes().replace(b'"data_bytes":16', b'"data_bytes":99999999'))
    elif spoil == "commit torn":
        commit.write_bytes(commit.read_bytes()[:-5])
    else:
        commit.write_bytes(commit.read_bytes().replace(b'"format_version":1', b'"format_version":2'))
    assert adopted(seat).slots[0].record is None
    assert "taken for empty" in caplog.text


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_slot_that_is_no_plain_file_is_refused(seat, kind):
    path = seat / "slot-0.data"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ContainerError, match=r"slot-0\.data"):
        adopted(seat)
    with pytest.raises((ContainerError, ShardFormatError)):
        mapping.map_readable(path, 1)


def test_a_missing_seat_is_named(seat):
    with pytest.raises(ContainerError, match="nowhere"):
        adopted(seat / "nowhere")
    with pytest.raises(ContainerError, match="nowhere"):
        Arena(seat / "nowhere").reserve(1, 1)


def test_a_forked_child_can_not_give_a_slot_up(seat):
    arena, record = save(seat, {"w": torch.ones(4)})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            arena.slots[0].invalidate()
        except ContainerError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert adopted(seat).slots[0].record == record


def test_a_closed_arena_lets_go_of_its_memory(seat):
    arena, _ = save(seat, {"w": torch.ones(4)})
    slot = arena.slots[0]
    assert str(slot.data_path) in Path("/proc/self/maps").read_text()
    arena.close()
    assert str(slot.data_path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(ContainerError, match="not mapped"):
        slot.bytes  # noqa: B018


def test_pages_are_mapped_without_a_change_where_the_kernel_knows_no_populate(seat, monkeypatch):
    monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 12345)
    monkeypatch.setattr(mapping, "_MADV_POPULATE_READ", 12345)
    arena, _ = save(seat, {"w": torch.arange(4.0)})
    again = adopted(seat)
    assert torch.equal(ShardReader.open(again.slots[0].path).state()["w"], torch.arange(4.0))
    mapping.map_readable(arena.slots[0].data_path, 5000).populate(write=False)


SMALL = """
import os, sys, torch
from pathlib import Path
from mlflashpoint.core import arena as module
from mlflashpoint.core.arena import Arena
from mlflashpoint.core.saver import ShardSaver
from mlflashpoint.errors import StoreFullError
from tests.core.shard_helpers import FIELDS, save

seat = Path(sys.argv[1])
saver = ShardSaver()
try:
    save(seat, {"w": torch.ones(16 << 20)}, saver=saver)
    raise SystemExit("it fits?")
except StoreFullError as error:
    print(error)
assert os.listdir(seat) == [], os.listdir(seat)

arena, record = save(seat, {"w": torch.ones(100)}, saver=saver, count=1)
# Another process takes the room between our look and our taking it.
module.free_bytes = lambda folder: 1 << 40
for attempt in (lambda: arena.reserve(2, 7 << 20), lambda: arena.reserve(1, 64 << 20)):
    try:
        attempt()
        raise SystemExit("it fits?")
    except StoreFullError as error:
        print(error)
assert len(arena.slots) == 1 and not (seat / "slot-1.data").exists()
again = Arena(seat)
assert again.adopt()[0].record == record

# A full file system also has no room for the index: the slot is left without a commit record.
staged = saver.stage(arena.slots[0], {"w": torch.ones(100)}, attributes={})
(seat / "filler").write_bytes(b"x" * (os.statvfs(seat).f_bavail * 4096))
try:
    saver.commit(staged, step=2, **FIELDS)
    raise SystemExit("it fits?")
except StoreFullError as error:
    print(error)
assert sorted(os.listdir(seat)) == ["filler", "slot-0.data", "slot-0.index"], os.listdir(seat)
(seat / "filler").unlink()
saver.commit(saver.stage(arena.slots[0], {"w": torch.ones(100)}, attributes={}), step=3, **FIELDS)
print("alive")
"""


def test_a_small_tmpfs_refuses_with_need_and_have_and_the_process_lives(tmp_path):
    seat = tmp_path / "memory"
    seat.mkdir()
    script = f"mount -t tmpfs -o size=8m none {seat} && exec {sys.executable} -c '{SMALL}' {seat}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"this machine lets no user mount a tmpfs: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"2 slots of {64 << 20} bytes need {128 << 20} more bytes, the store has {8 << 20} ")
    assert "MLFLASHPOINT_BASE_CONTAINER" in lines[0]
    assert "No space left" in lines[1] and "No space left" in lines[2] and "step 2" in lines[3]
    assert lines[-1] == "alive"


def test_the_memory_behind_the_file_system_counts_too(seat, monkeypatch):
    monkeypatch.setattr(arena_module, "free_bytes", lambda folder: 3 * MIB)
    with pytest.raises(StoreFullError, match=f"need {4 * MIB} more bytes, the store has {3 * MIB}"):
        Arena(seat).reserve(2, 1)
    assert os.listdir(seat) == []


def test_a_state_larger_than_its_slot_is_refused_and_the_slot_stays(seat):
    saver = ShardSaver()
    arena, record = save(seat, {"w": torch.arange(10.0)}, saver=saver)
    with pytest.raises(StoreFullError, match=rf"needs {4 * 3 * MIB} bytes, the slot has {2 * MIB}"):
        saver.stage(arena.slots[0], {"w": torch.zeros(3 * MIB)})
    reader = ShardReader.open(arena.slots[0].path)
    assert reader.record == record and differences(reader.state(), {"w": torch.arange(10.0)}) == []
