"""Real interpreters with and without the agent, and small frameworks for it to patch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "sitecustomize"
JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_COMPLETION_ID")

#: a sitecustomize behind ours, which has the agent use a table of the test's instead of the real ones
RESTART = """
from mlflashpoint.agent import start
start.stop()
start.start({frameworks!r})
"""

TABLE = """
import sys
from mlflashpoint.agent.patch import Patch

CALLS = []

def record(call, instance, args, kwargs):
    CALLS.append((instance, args, dict(kwargs)))
    return call()

async def record_async(call, instance, args, kwargs):
    CALLS.append((instance, args, dict(kwargs)))
    return await call()

def patch(target, module="fw.core", framework="bridge", **kind):
    kind = kind if set(kind) & {"around", "before", "after", "replace"} else {"around": __name__ + ":record", **kind}
    return Patch(framework + ":" + module + ":" + target, framework, module, target, "bridge_enabled", **kind)

"""

STATES = """
def states():
    from mlflashpoint.agent.registry import REGISTRY
    return {handle.patch.target: (str(handle.state), handle.reason) for handle in REGISTRY.handles.values()}

"""


def environment(*path: Path | str, on: bool | str = True, **extra: str) -> dict[str, str]:
    """The environment of a job, without what this process has of the agent's, Python's and a scheduler's."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLASHPOINT_", "PYTHON", "_MLFLASHPOINT", "COV_")) and name not in JOB_VARIABLES
    }
    switch = {} if on is False else {"MLFLASHPOINT_ENABLED": "1" if on is True else on}
    pythonpath = os.pathsep.join(map(str, path))
    return {**kept, "OMP_NUM_THREADS": "1", **switch, **({"PYTHONPATH": pythonpath} if pythonpath else {}), **extra}


def python(
    *arguments: str,
    env: dict[str, str],
    executable: str | Path = sys.executable,
    stdin: str | None = None,
    cwd: Path | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(executable), *arguments],
        env=env,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
    )


class Workspace:
    """A folder on PYTHONPATH behind the bootstrap, with a framework ``fw`` and a table for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.frameworks: tuple[tuple[str, tuple[str, ...], str], ...] = (("bridge", ("fw",), "table"),)

    def write(self, name: str, source: str = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    def table(self, patches: str, functions: str = "", name: str = "table") -> None:
        self.write(f"{name}.py", f"{TABLE}{functions}\nPATCHES = ({patches},)\n")

    def environment(self, **extra: str) -> dict[str, str]:
        self.write("sitecustomize.py", RESTART.format(frameworks=self.frameworks))
        return environment(BOOTSTRAP, self.folder, **{"MLFLASHPOINT_JOB_ID": "agent-test", **extra})

    def run(self, code: str, *, timeout: float = 60, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run ``code`` (which can call ``states()``) under the agent."""
        return python("-c", STATES + code, env=self.environment(**extra), timeout=timeout)

    def check(self, code: str, *, timeout: float = 60, **extra: str) -> str:
        """The same, and it must end well; returns what it wrote to stdout."""
        done = self.run(code, timeout=timeout, **extra)
        assert done.returncode == 0, done.stderr
        return done.stdout
