"""Starts ranks from a process that has imported their framework already: importing takes most of a launch.

Run as a script under the agent or without it. Each line on standard input is a job in JSON; each answer is one line.
The ranks are forked, so every one is a process of its own that can be killed, and none has run anything of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
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
    #: the deadline was over, and what was left has been killed
    late: bool = False

    @property
    def log(self) -> str:
        return "\n".join(self.logs)


class Zygote:
    """Client side: one warm process.

    Args:
        python: interpreter.
        recipe: path of the module that it imports; a rank runs its ``main(argv)``, or a script of the job's own.
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
        self,
        argv: list[str],
        *,
        ranks: int = 1,
        environ: dict[str, str] | None = None,
        deadline_s: float = 120,
        grace_s: float = 1,
        script: Path | None = None,
        homes: list[tuple[int, int]] | None = None,
        master: str = "127.0.0.1",
    ) -> Outcome:
        """Run the recipe, or ``script`` as ``__main__``, once on ``ranks`` ranks.

        Kills what is left ``grace_s`` after a rank has failed, and when the deadline is over. A script finds in its
        environment no other settings of ours than those in ``environ``, and ends as the interpreter ends.

        Args:
            homes: for each rank the node that it lives on, as a process id on it, and its local rank; None for all on
                this machine. ``master`` is then the address of rank 0's node.
        """
        self._jobs += 1
        out = self.folder / f"job-{self._jobs}-{id(self)}"
        out.mkdir()
        job = {
            "argv": argv, "ranks": ranks, "environ": environ or {}, "out": str(out), "deadline_s": deadline_s,
            "grace_s": grace_s, "script": script and str(script), "homes": homes, "master": master,
        }  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"the warm process died:\n{self._log.read()}")
        answer = json.loads(line)
        logs = [(out / f"rank-{rank}.log").read_text() for rank in range(ranks)]
        results = [json.loads(file.read_text()) for file in sorted(out.glob("result-*.json"))]
        return Outcome(answer["statuses"], logs, results, answer["late"])

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        # An interpreter with a framework in it takes seconds to end by itself.
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            pipe.close()


#: where the answers go; not for ranks
_answers = -1


def _serve(recipe: Path) -> dict | None:
    """Answer job after job; returns a job in a rank of it that is to run its script, and None at the end."""
    global _answers
    # What a framework logs to standard output while it is imported is no answer.
    _answers = os.dup(1)
    os.dup2(2, 1)
    sys.path[0] = str(recipe.parent)
    # Nothing that is imported is garbage: looking for it takes an eighth of the time, and the ranks a look each.
    gc.disable()
    module = importlib.import_module(recipe.stem)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        job = json.loads(line)
        answer = _run(module, job)
        if answer is None:
            return job
        os.write(_answers, (json.dumps(answer) + "\n").encode())
    return None


def _run(module, job: dict) -> dict | None:
    """Fork the ranks and wait for them; None in a rank of a script."""
    # Each job has its own port: a killed rank's may not be free yet.
    port = str(_free_port())
    homes = job["homes"] or []
    store = _fork_store(int(port), *homes[:1]) if job["script"] and job["ranks"] > 1 else None
    children = {}
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            if homes:
                _move_to(homes[rank][0])
            if job["script"]:
                _become_script(job, rank, port)
                return None
            _child(module, job, rank, port)
        children[pid] = rank
    statuses = [0] * job["ranks"]
    late = False
    deadline = time.monotonic() + job["deadline_s"]
    give_up = deadline
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            statuses[children.pop(pid)] = code
            _end_group(pid)
            if code:
                # like a launcher, which ends the other ranks when one has died
                give_up = min(give_up, time.monotonic() + job["grace_s"])
        elif time.monotonic() > give_up:
            late = give_up == deadline
            for child in children:
                os.kill(child, signal.SIGKILL)
            give_up = float("inf")
        else:
            time.sleep(0.02)
    if store is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(store, signal.SIGKILL)
            os.waitpid(store, 0)
    return {"statuses": statuses, "late": late}


def _end_group(leader: int) -> None:
    """End what a rank has started and left behind when it was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _move_to(node: int) -> None:
    """Go on as a process of the node: its network, memory, host name and process tree; the caller then only waits."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as opened:
        spaces = [opened.enter_context(open(f"/proc/{node}/ns/{name}")) for name in ("net", "uts", "pid", "mnt")]
        for space in spaces:
            if libc.setns(space.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"can't enter {space.name}")
    # Only children are in the node's process tree, and end with it.
    child = os.fork()
    if child == 0:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _fork_store(port: int, home: tuple[int, int] | None = None) -> int:
    """A process that holds the job's store as torchrun does, so that it outlives each rank."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads can't be forked safely"
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            if home is not None:
                _move_to(home[0])
            import torch.distributed as dist

            held = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            while held and os.getppid() != 1:
                time.sleep(1)
        finally:
            os._exit(1)
    return pid


def _child(module, job: dict, rank: int, port: str) -> None:
    code = 1
    try:
        _settle(job, rank, port)
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


def _become_script(job: dict, rank: int, port: str) -> None:
    for name in [name for name in os.environ if name.startswith(("MLFLASHPOINT_", "TORCHELASTIC_"))]:
        del os.environ[name]
    _settle(job, rank, port)
    if job["ranks"] > 1:
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0"
        )
    sys.path[0] = str(Path(job["script"]).parent)
    sys.argv = [job["script"], *job["argv"]]


def _settle(job: dict, rank: int, port: str) -> None:
    """Give this process the environment, the log and the folder of its rank."""
    os.environ.update(job["environ"])
    if job["ranks"] > 1:
        homes = job["homes"] or [(0, number) for number in range(job["ranks"])]
        nodes = [node for node, _ in homes]
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(homes[rank][1]),
            WORLD_SIZE=str(job["ranks"]),
            LOCAL_WORLD_SIZE=str(nodes.count(nodes[rank])),
            GROUP_RANK=str(list(dict.fromkeys(nodes)).index(nodes[rank])),
            MASTER_ADDR=job["master"],
            MASTER_PORT=port,
            TORCHELASTIC_RUN_ID="zygote",
        )
    os.close(_answers)
    log = os.open(f"{job['out']}/rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["out"])


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    mine = _serve(Path(sys.argv[1]))
    if mine is not None:
        # The last thing that this rank does: the interpreter ends behind it as behind any script.
        runpy.run_path(mine["script"], run_name="__main__")
