"""The real timers of megatron-core on two ranks, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflashpoint.timings.parser import parse
from tests.timings.helpers import ROOT, environ

_OVERLAYS = [ROOT / ".envs" / "megatron" / release for release in ("0.16.1", "0.15.3")]

pytestmark = pytest.mark.multiprocess


def _path_of_megatron() -> str | None:
    """What PYTHONPATH needs for ``megatron.core``: nothing, or the overlay that tools/envs/megatron.sh builds."""
    found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    return "" if found else next((str(path) for path in _OVERLAYS if (path / "megatron" / "core").is_dir()), None)


def test_the_real_timers_blocks_of_two_ranks_under_torchrun_are_measured(tmp_path: Path) -> None:
    path = _path_of_megatron()
    if path is None:
        pytest.skip("NOT RUN: megatron-core is not installed (tools/envs/megatron.sh builds it)")
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--tee=3"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--log-dir={tmp_path}/torchrun"),
        str(Path(__file__).with_name("timers_job.py")),
    ]
    paths = os.pathsep.join(filter(None, (str(ROOT), path)))
    more = {"TIMERS_OPTIONS": "minmax,max,all", "STALL_MS": "100", "PYTHONPATH": paths}
    with open(tmp_path / "job.log", "wb") as log:
        subprocess.run(command, env=environ(more), stdout=log, stderr=subprocess.STDOUT, timeout=150, check=True)
    samples = parse("x", [str(tmp_path / "job.log")]).timers["save-checkpoint"]
    # three saves under each of the three options; rank 1 is the slower one
    assert [sample.step for sample in samples] == list(range(1, 10))
    assert [sample.least is None for sample in samples] == [False] * 3 + [True] * 3 + [False] * 3
    for sample in samples:
        assert sample.seconds >= 0.12
        assert sample.least is None or 0.1 <= sample.least < sample.seconds
