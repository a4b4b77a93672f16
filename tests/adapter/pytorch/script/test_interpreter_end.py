"""A script that lets the interpreter end leaves a durable checkpoint; from Python 3.12 on no thread starts then."""

import sys

import pytest

from tests.adapter.pytorch.launch import ROOT
from tests.adapter.pytorch.script.jobs import Job

pytestmark = pytest.mark.multiprocess

PYTHON_3_12 = ROOT / ".envs" / "bridge" / "bin" / "python"


@pytest.mark.parametrize("python", [sys.executable, str(PYTHON_3_12)], ids=["own", "3.12"])
def test_one_process_without_a_group_leaves_its_newest_checkpoint_on_disk(tmp_path, python):
    if python == str(PYTHON_3_12) and not PYTHON_3_12.exists():
        pytest.skip(f"{PYTHON_3_12} is missing: tools/envs/bridge.sh builds it")
    one = Job(tmp_path, ranks=1, python=python, DCP_MODE="replace")
    try:
        one.start("--kind", "single", "--steps", 3, "--end", "exit")
        one.forget_memory()
        (left,) = one.start("--kind", "single", "--steps", 3, "--end", "exit", agent=False)
        assert left["resumed"] == 3
        # The same once its state came out of memory.
        one.start("--kind", "single", "--steps", 5, "--die-after", 5, fails=True)
        one.start("--kind", "single", "--steps", 6, "--end", "exit")
        one.forget_memory()
        (left,) = one.start("--kind", "single", "--steps", 6, "--end", "exit", agent=False)
        assert left["resumed"] == 6
    finally:
        one.close()
