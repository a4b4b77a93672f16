"""A job that ends right after a save that the agent made: what is in memory afterwards is whole, or is not chosen."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.support import Workspace

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here"),
]

#: a memory save behind the framework's own, by the real store
FUNCTIONS = """
def remember(call, instance, args, kwargs):
    from mlflashpoint.core.runtimes import get_runtime
    result = call()
    assert get_runtime().save({"weights": args[0]}, step=kwargs["step"]).ok
    return result
"""

JOB = """
import fw.core, os, signal, torch
from mlflashpoint.core.runtimes import get_runtime
assert get_runtime().find_latest() is None
weights = torch.zeros(4 << 20)
for step in (1, 2, 3):
    weights.fill_(step)
    fw.core.save(weights, step=step)
    if step == 2:
        assert get_runtime().flush(30)
weights.fill_(99)
"""

RESUME = """
import torch
from mlflashpoint.core.runtimes import get_runtime
recovery = get_runtime().find_latest()
weights = get_runtime().load(recovery).state["weights"]
print(recovery.step, bool((weights == recovery.step).all()), weights.numel())
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mlflashpoint-test-exit-", dir="/dev/shm"))
    yield folder / "job"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os._exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["exit", "sigterm", "sigkill"],
)
def test_no_half_version_looks_complete_after_it(workspace: Workspace, memory: Path, ending: str, code: int) -> None:
    workspace.table('patch("save", around="table:remember")', FUNCTIONS)
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MLFLASHPOINT_REPLICAS": "0"}
    env["MLFLASHPOINT_BASE_CONTAINER"] = str(memory)
    done = workspace.run(JOB + ending, timeout=120, **env)
    assert done.returncode == code, done.stderr
    step, whole, size = workspace.check(RESUME, timeout=120, **env).split()
    assert step in ("2", "3") and (whole, size) == ("True", str(4 << 20))
