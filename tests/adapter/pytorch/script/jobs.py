"""Starts train.py as users do, torchrun under the agent, and says what came of it."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from tests.adapter.pytorch.launch import ROOT, free_port, with_group_gone

DEADLINE_S = int(os.environ.get("TEST_DEADLINE_S", 150))
SCRIPT = Path(__file__).parent / "train.py"


class Job:
    """One job with its memory and its durable folder; ``start`` it as often as it takes."""

    def __init__(self, folder, *, python=sys.executable, ranks=2, **settings):
        self.python, self.ranks, self.settings = python, ranks, settings
        self.memory = Path(f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}")
        self.checkpoints = folder / "checkpoints"
        self.folder = folder
        self.log = ""

    def start(self, *arguments, agent=True, fails=False, script=SCRIPT):
        """Run it to its end; returns the ranks' reports, None for one that wrote none."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("MLFLASHPOINT_", "TORCHELASTIC"))
        }
        environment |= {
            "MLFLASHPOINT_ENABLED": str(int(agent)), "MLFLASHPOINT_JOB_ID": "script",
            "MLFLASHPOINT_BASE_CONTAINER": str(self.memory), "MLFLASHPOINT_REPLICAS": "0",
            "MLFLASHPOINT_DEADLINE_S": "60", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
            **{f"MLFLASHPOINT_{name}": value for name, value in self.settings.items()},
        }  # fmt: skip
        command = [self.python, "-m", "mlflashpoint.run"]
        if self.ranks > 1:
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", f"--master-port={free_port()}"]
        command += [script, "--folder", self.checkpoints, "--out", out, *arguments]
        with (self.folder / "log.txt").open("w+") as log:
            process = subprocess.Popen(
                list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with_group_gone(process)
            log.seek(0)
            self.log = log.read()
        assert code is not None, f"the job hangs\n{self.log[-4000:]}"
        assert (code != 0) == fails, f"exit code {code}\n{self.log[-4000:]}"
        reports = [out / f"report-{rank}.json" for rank in range(self.ranks)]
        return [json.loads(path.read_text()) if path.exists() else None for path in reports]

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
