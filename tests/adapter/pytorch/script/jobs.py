"""Starts train.py as users do, torchrun under the agent, and says what came of it.

Most jobs are started by a warm process under the same agent instead, which forks the ranks: what they import is there.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from tests.adapter.pytorch.launch import ROOT, free_port, with_group_gone
from tests.warm import Zygote

DEADLINE_S = int(os.environ.get("TEST_DEADLINE_S", 150))
SCRIPT = Path(__file__).parent / "train.py"
#: seconds after which torchrun sees that a rank has died
GRACE_S = 0.1
#: settings that are read at each call; every other one a process reads as it starts
READ_AT_EACH_CALL = {"DCP_MODE", "DCP_DURABLE_EVERY_N_SAVES", "DRAIN_DIR"}


def environment(*, agent, **settings):
    """What a start finds in its environment."""
    others = ("MLFLASHPOINT_", "TORCHELASTIC")
    found = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return found | {
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT),
        "MLFLASHPOINT_ENABLED": str(int(agent)), "MLFLASHPOINT_JOB_ID": "script", "MLFLASHPOINT_REPLICAS": "0",
        "MLFLASHPOINT_DEADLINE_S": "60", **{f"MLFLASHPOINT_{name}": value for name, value in settings.items()},
    }  # fmt: skip


class Warm:
    """The warm processes, with the agent and without it, each started when the first job asks for it."""

    def __init__(self, folder):
        self.folder = folder
        self.zygotes = {}

    def zygote(self, agent):
        if agent not in self.zygotes:
            folder = self.folder / f"agent-{int(agent)}"
            folder.mkdir()
            environ = environment(agent=agent, DCP_MODE="augment")
            imports = Path(__file__).with_name("imports.py")
            self.zygotes[agent] = Zygote(Path(sys.executable), imports, environ, agent=True, folder=folder)
        return self.zygotes[agent]

    def close(self):
        for zygote in self.zygotes.values():
            zygote.close()


class Job:
    """One job with its memory and its durable folder; ``start`` it as often as it takes.

    Args:
        folder: of the job.
        warm: who starts the ranks; None for the command that users type.
        python: interpreter, without ``warm``.
        ranks: how many; one has no launcher.
        settings: ours, without their prefix.
    """

    def __init__(self, folder, *, warm=None, python=sys.executable, ranks=2, **settings):
        self.warm, self.python, self.ranks, self.settings = warm, python, ranks, settings
        self.memory = Path(f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}")
        self.checkpoints = folder / "checkpoints"
        self.folder = folder
        self.log = ""

    def start(self, *arguments, agent=True, fails=False, script=SCRIPT):
        """Run it to its end; returns the ranks' reports, None for one that wrote none."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        environ = environment(agent=agent, BASE_CONTAINER=str(self.memory), **self.settings)
        arguments = [str(value) for value in ("--folder", self.checkpoints, "--out", out, *arguments)]
        run = self._launch if self.warm is None else self._fork
        code = run(script, arguments, environ, agent)
        assert code is not None, f"the job hangs\n{self.log[-4000:]}"
        assert (code != 0) == fails, f"exit code {code}\n{self.log[-4000:]}"
        reports = [out / f"report-{rank}.json" for rank in range(self.ranks)]
        return [json.loads(path.read_text()) if path.exists() else None for path in reports]

    def _launch(self, script, arguments, environ, agent):
        """Exit code of the command, None if it had to be killed."""
        command = [self.python, "-m", "mlflashpoint.run"]
        if self.ranks > 1:
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", f"--master-port={free_port()}"]
        command = [*map(str, command), str(script), *arguments]
        with (self.folder / "log.txt").open("w+") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
            try:
                return process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with_group_gone(process)
                log.seek(0)
                self.log = log.read()

    def _fork(self, script, arguments, environ, agent):
        """The same from the warm process."""
        if agent:
            assert set(self.settings) <= READ_AT_EACH_CALL and self.settings.get("DCP_MODE", "off") != "off"
        ours = {name: value for name, value in environ.items() if name.startswith("MLFLASHPOINT_")}
        outcome = self.warm.zygote(agent).run(
            arguments, ranks=self.ranks, environ=ours, deadline_s=DEADLINE_S, grace_s=GRACE_S, script=script
        )
        self.log = outcome.log
        return None if outcome.late else next((status for status in outcome.statuses if status), 0)

    def forget_memory(self):
        shutil.rmtree(self.memory, ignore_errors=True)

    def close(self):
        self.forget_memory()


def resumed_as(straight, reports):
    """The step that all ranks resumed at; what they then had and did is what the straight run had and did."""
    steps = {report["resumed"] for report in reports}
    assert len(steps) == 1
    for mine, theirs in zip(reports, straight, strict=True):
        assert len(mine["digests"]) > 1
        for step, digest in mine["digests"].items():
            assert digest == theirs["digests"][step], f"step {step} differs"
    return steps.pop()
