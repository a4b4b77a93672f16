"""Starts ranks of a recipe from a process that has imported the framework already: importing takes most of a launch.

Run as a script under the agent or without it. Each line on standard input is a job in JSON; each answer is one line.
The ranks are forked, so every one is a process of its own that can be killed, and none has run anything of another.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """How the ranks of one job ended: exit status per rank (negative: signal), and their logs."""

    statuses: list[int]
    logs: list[str]
    results: list[dict] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "\n".join(self.logs)


class Zygote:
    """Client side: one warm process.

    Args:
        python: interpreter.
        recipe: module path of the recipe, whose ``main(argv)`` a rank runs.
        environ: environment of the warm process.
        agent: start it under ``mlflashpoint.run``.
    """

    def __init__(self, python: Path, recipe: Path, environ: dict[str, str], *, agent: bool, folder: Path) -> None:
        script = [str(Path(__file__)), str(recipe)]
        command = [str(python), *(["-m", "mlflashpoint.run"] if agent else []), *script]
        self.folder = folder
        self._log = open(folder / f"zygote-{agent}.log", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environ,
            cwd=folder,
            text=True,
        )
        self._jobs = 0

    def run(
        self, argv: list[str], *, ranks: int = 1, environ: dict[str, str] | None = None, deadline_s: float = 120
    ) -> Outcome:
        """Run the recipe once on ``ranks`` ranks; kills what is left when a rank has died or the deadline is over."""
        self._jobs += 1
        out = self.folder / f"job-{self._jobs}-{id(self)}"
        out.mkdir()
        job = {"argv": argv, "ranks": ranks, "environ": environ or {}, "out": str(out), "deadline_s": deadline_s}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"the warm process died:\n{self._log.read()}")
        statuses = json.loads(line)
        logs = [(out / f"rank-{rank}.log").read_text() for rank in range(ranks)]
        results = [json.loads(file.read_text()) for file in sorted(out.glob("result-*.json"))]
        return Outcome(statuses, logs, results)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def _serve(recipe: Path) -> None:
    sys.path.insert(0, str(recipe.parent))
    module = importlib.import_module(recipe.stem)
    for line in sys.stdin:
        job = json.loads(line)
        statuses = _run(module, job)
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


def _run(module, job: dict) -> list[int]:
    # Each job has its own port: a killed rank's may not be free yet.
    port = str(_free_port())
    children = {}
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _child(module, job, rank, port)
        children[pid] = rank
    statuses = [0] * job["ranks"]
    give_up = time.monotonic() + job["deadline_s"]
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            statuses[children.pop(pid)] = code
            _end_group(pid)
            if code:
                # like a launcher, which ends the other ranks when one has died
                give_up = min(give_up, time.monotonic() + float(job["environ"].get("GRACE_S", "1")))
        elif time.monotonic() > give_up:
            for child in children:
                os.kill(child, signal.SIGKILL)
            give_up = float("inf")
        else:
            time.sleep(0.02)
    return statuses


def _end_group(leader: int) -> None:
    """End what a rank has started and left behind when it was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _child(module, job: dict, rank: int, port: str) -> None:
    code = 1
    try:
        os.environ.update(job["environ"])
        if job["ranks"] > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(job["ranks"]),
                LOCAL_WORLD_SIZE=str(job["ranks"]),
                GROUP_RANK="0",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                TORCHELASTIC_RUN_ID="zygote",
            )
        log = os.open(f"{job['out']}/rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["out"])
        module.main([*job["argv"], "--out", job["out"]])
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
