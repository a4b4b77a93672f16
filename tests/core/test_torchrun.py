"""The store under torchrun as jobs are really started: its environment, its store, its restarts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]


def torchrun(base, out, *, kill_at):
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLASHPOINT_", "TORCHELASTIC_"))
    }
    environ |= {
        "MLFLASHPOINT_BASE_CONTAINER": str(base),
        "MLFLASHPOINT_JOB_ID": "elastic",
        "MLFLASHPOINT_DEADLINE_S": "60",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    script = [str(ROOT / "tests" / "core" / "elastic_job.py"), "12", str(kill_at), str(out)]
    process = subprocess.Popen(
        [*launch, *script], env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(2)]


def test_a_job_that_torchrun_restarts_goes_on_from_memory_bit_for_bit(tmp_path):
    with memory_folder() as folder:
        straight = torchrun(folder / "straight", tmp_path / "straight", kill_at=0)
        killed = torchrun(folder / "killed", tmp_path / "killed", kill_at=6)
    assert [(result["first"], result["attempt"]) for result in straight] == [(0, 0), (0, 0)]
    assert {result["attempt"] for result in killed} == {1}
    first = {result["first"] for result in killed}
    assert len(first) == 1
    assert first.pop() in (4, 5, 6)
    assert {result["sum"] for result in killed} == {result["sum"] for result in straight}
    assert killed[0]["stats"]["last_complete_step"] >= 11
