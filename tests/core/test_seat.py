import errno
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from mlflashpoint.core.seat import SeatLock, file_lock, live_owner
from mlflashpoint.errors import ContainerError, StoreFullError

HOLD = """
import sys, time
from pathlib import Path
from mlflashpoint.core.seat import SeatLock
lock = SeatLock(Path(sys.argv[1]), wait_s=5)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)


def test_a_seat_of_a_live_process_is_refused_and_its_owner_named(tmp_path, holder):
    assert live_owner(tmp_path) == holder.pid
    with pytest.raises(ContainerError, match=f"pid {holder.pid}"):
        SeatLock(tmp_path, wait_s=0.1)


def test_the_remedy_for_a_seat_of_another_job_names_the_job_id_and_the_container(tmp_path, holder):
    with pytest.raises(ContainerError) as caught:
        SeatLock(tmp_path, wait_s=0.1)
    remedy = str(caught.value).partition("; remedy: ")[2]
    assert "end that process" in remedy
    assert "MLFLASHPOINT_JOB_ID" in remedy and "MLFLASHPOINT_BASE_CONTAINER" in remedy


def test_a_wait_for_a_seat_is_told_in_one_line(tmp_path, holder, caplog):
    caplog.set_level(logging.INFO, logger="mlflashpoint.core")
    with pytest.raises(ContainerError):
        SeatLock(tmp_path, wait_s=0.3)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert f"process {holder.pid}" in line and str(tmp_path) in line and "0.3 s" in line


def test_a_free_seat_and_one_that_is_only_tried_tell_nothing(tmp_path, holder, caplog):
    caplog.set_level(logging.INFO, logger="mlflashpoint.core")
    with pytest.raises(ContainerError):
        SeatLock(tmp_path, wait_s=0)
    free = tmp_path / "free"
    free.mkdir()
    SeatLock(free, wait_s=1).release()
    assert caplog.records == []


def test_a_folder_in_the_locks_place_is_named_with_what_helps(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(ContainerError) as caught:
        SeatLock(tmp_path, wait_s=0)
    assert caught.value.path == str(tmp_path / "lock") and caught.value.remedy.startswith("remove what lies there")


def test_a_lock_for_which_there_is_no_room_is_a_full_store_of_that_setting(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(StoreFullError) as caught:
        SeatLock(tmp_path, wait_s=0)
    assert (caught.value.setting, caught.value.path) == ("MLFLASHPOINT_BASE_CONTAINER", str(tmp_path / "lock"))
    assert caught.value.remedy.startswith("free memory")


def test_a_killed_owner_leaves_the_seat_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    lock = SeatLock(tmp_path, wait_s=10)
    assert live_owner(tmp_path) == os.getpid()
    lock.release()
    assert live_owner(tmp_path) is None


def test_a_seat_nobody_ever_took_has_no_owner(tmp_path):
    assert live_owner(tmp_path) is None


def test_a_forked_child_does_not_keep_the_seat(tmp_path):
    lock = SeatLock(tmp_path, wait_s=1)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(release[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        lock.release()
        assert live_owner(tmp_path) is None
    finally:
        os.write(release[1], b"x")
        os.waitpid(child, 0)


def test_two_owners_in_one_process_exclude_each_other(tmp_path):
    lock = SeatLock(tmp_path, wait_s=1)
    with pytest.raises(ContainerError):
        SeatLock(tmp_path, wait_s=0.05)
    lock.release()
    SeatLock(tmp_path, wait_s=1).release()


def test_a_lock_that_is_never_released_is_given_up_at_the_deadline(tmp_path):
    started = time.monotonic()
    with file_lock(tmp_path / "x", wait_s=1), pytest.raises(TimeoutError), file_lock(tmp_path / "x", wait_s=0.2):
        pass
    assert time.monotonic() - started < 30
