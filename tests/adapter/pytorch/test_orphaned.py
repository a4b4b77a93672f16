"""A checkpoint process whose training process was killed does not stay, and not on its seat."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlflashpoint.core.seat import SeatLock
from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


def until(met, seconds):
    give_up = time.monotonic() + seconds
    while not met() and time.monotonic() < give_up:
        time.sleep(0.02)
    return met()


def test_a_checkpoint_process_that_hangs_in_a_save_leaves_its_seat_soon_after_its_training_process_was_killed(tmp_path):
    told = tmp_path / "hangs"
    with memory_folder() as memory, open(tmp_path / "log", "w") as log:
        environ = {
            **os.environ, **launch.environment(), "REPORTS": str(tmp_path), "MLFLASHPOINT_JOB_ID": "orphaned",
            "MLFLASHPOINT_BASE_CONTAINER": str(memory / "job"), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port()),
        }  # fmt: skip
        command = [sys.executable, Path(__file__).with_name("orphaned_worker.py")]
        training = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            assert until(told.exists, launch.DEADLINE_S), (tmp_path / "log").read_text()
            os.kill(training.pid, signal.SIGKILL)
            training.wait()
            # It waits as long as a start does.
            SeatLock(memory / "job" / "default" / "seat-0", wait_s=10).release()
        finally:
            launch.with_group_gone(training)
