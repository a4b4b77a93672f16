"""The store under torchrun as jobs are really started: its environment, its store, its restarts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150


def torchrun(base, out, *, kill_at):
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLASHPOINT_", "TORCHELASTIC_"))
    }
    environ |= {
        "MLFLASHPOINT_BASE_CONTAINER": str(base),
        "MLFLASHPOINT_JOB_ID": "elastic",
        "MLFLASHPOINT_DEADLINE_S": "60",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = [str(ROOT / "tests" / "core" / "elastic_job.py"), "12", str(kill_at), str(out)]
    with open(out.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen([*launch, *script], env=environ, stdout=log, stderr=log)
        try:
            code = process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            # Its workers have sessions of their own: only torchrun itself can end them.
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=30)
        finally:
            process.kill()
        log.seek(0)
        assert code == 0, log.read()[-3000:]
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(2)]


def unbroken(steps):
    """The same training in one process, without a store, a launcher or a kill: the sum of the weights at the end."""
    weights = torch.zeros(1000, dtype=torch.float64)
    momentum = torch.zeros_like(weights)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(steps):
        momentum.mul_(0.9).add_(sum(torch.randn(1000, dtype=torch.float64, generator=g) for g in generators))
        weights.sub_(momentum, alpha=0.1)
    return weights.sum().item().hex()


def test_a_job_that_torchrun_restarts_goes_on_from_memory_bit_for_bit(tmp_path):
    with memory_folder() as base:
        results = torchrun(base / "base", tmp_path / "out", kill_at=6)
    assert {result["attempt"] for result in results} == {1}
    assert results[0]["first"] == results[1]["first"]
    assert results[0]["first"] in (4, 5, 6)
    assert {result["sum"] for result in results} == {unbroken(12)}
    assert results[0]["stats"]["last_complete_step"] >= 11
