"""The Python of docs/pytorch-dcp.md runs as it stands there."""

import os
import re
import shutil
import subprocess
import sys
import uuid

import pytest

from tests.adapter.pytorch.launch import ROOT

pytestmark = pytest.mark.multiprocess

CHECK = """
assert newest == store.version(7) and state["step"] == 7
"""
READ = """
assert newest == reads.version(8)
assert all(weights["model"][name].equal(value) for name, value in state["model"].items())
"""


def test_the_pages_python_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "pytorch-dcp.md").read_text(), re.M | re.S)
    assert len(blocks) == 3
    base = f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}"
    variables = {
        **os.environ,
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        **{"MLFLASHPOINT_JOB_ID": "docs", "MLFLASHPOINT_BASE_CONTAINER": base, "MLFLASHPOINT_REPLICAS": "0"},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    begin = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    code = "".join([begin, blocks[0], CHECK, *blocks[1:], READ])
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert done.returncode == 0, done.stderr
