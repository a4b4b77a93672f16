"""``make demo``: a real training job is killed, and goes on from memory.

Two ranks of Megatron Bridge train a GPT on this machine's processors, under the agent, with ``demo/train.py`` as a user
wrote it. Its recipe saves durably every ``DURABLE`` steps; the environment adds a save to memory every ``MEMORY``
steps. In the middle every process of the job is killed, and the same command is given again. Everything printed is read
from the two runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VERSION = "0.6.2"
RANKS = 2
STEPS, MEMORY, DURABLE = 12, 2, 5
KILL_AFTER = 7
DEADLINE_S = 600.0

WORK = ROOT / ".demo"
MEMORY_FOLDER = Path(f"/dev/shm/mlflashpoint-demo-{os.getpid()}")


class DemoError(Exception):
    """The demo did not see what it is there to show."""


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def command(record: Path) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-addr=127.0.0.1"]
    training = ["demo/train.py", str(WORK / "durable"), str(record), str(STEPS), str(DURABLE)]
    return [sys.executable, "-m", "mlflashpoint.run", *launcher, f"--master-port={port}", *training]


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLASHPOINT_", "PYTHON"))}
    path = [ROOT / ".envs" / "bridge-overlays" / VERSION, ROOT / "tools", ROOT]
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "MLFLASHPOINT_JOB_ID": "demo",
        "MLFLASHPOINT_BASE_CONTAINER": str(MEMORY_FOLDER),
        "MLFLASHPOINT_SAVE_EVERY_N_STEPS": str(MEMORY),
        "MLFLASHPOINT_REPLICAS": "0",
        "MLFLASHPOINT_LOG_LEVEL": "DEBUG",
    }


class Run:
    """One start of the training job."""

    def __init__(self, name: str) -> None:
        self.record = WORK / f"{name}.record"
        self.log = WORK / f"{name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command(self.record), cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True
            )

    def events(self, rank: int, kind: str = "") -> list[dict[str, Any]]:
        path = Path(f"{self.record}.{rank}")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if not kind or event["event"] == kind]

    def state(self, rank: int) -> dict[int, dict[str, Any]]:
        """What each rank's state was after each step, without the names of the record itself."""
        return {
            event["step"]: {key: value for key, value in event.items() if key not in ("event", "pid")}
            for event in self.events(rank)
        }

    def lines(self, marker: str) -> list[dict[str, Any]]:
        """The numbers of mlflashpoint's own log lines of one kind."""
        marker = f"mlflashpoint {marker} "
        text = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line.partition(marker)[2]) for line in text if marker in line]

    def blocking(self, kind: str) -> dict[int, float]:
        """Milliseconds that the slowest rank stood still for each save of one kind, by step."""
        slowest: dict[int, float] = {}
        for line in self.lines("observe"):
            if line["kind"] == kind:
                slowest[line["step"]] = max(slowest.get(line["step"], 0.0), line["blocking_ms"])
        return slowest

    def wait(self, ready: Any, what: str) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not ready():
            if time.monotonic() > give_up or self.process.poll() not in (None, 0):
                raise DemoError(f"the job did not {what}; its log is {self.log}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to the launcher and to every rank."""
        os.killpg(self.process.pid, signal.SIGKILL)
        for rank in range(RANKS):
            for event in self.events(rank)[-1:]:
                # Each rank leads a session; what it has started goes with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(event["pid"], signal.SIGKILL)
        self.process.wait(DEADLINE_S)


def main() -> int:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    runs: list[Run] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        show(runs)
    except DemoError as error:
        say(f"demo: failed: {error}")
        return 1
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.kill()
        shutil.rmtree(MEMORY_FOLDER, ignore_errors=True)
    return 0


def show(runs: list[Run]) -> None:
    """Run it all; raises DemoError where something is not as it should be."""
    say(f"a GPT trains {STEPS} steps on {RANKS} ranks of Megatron Bridge {VERSION}; its recipe knows nothing of us")
    say(f"  durable saves every {DURABLE} steps, by the recipe; memory saves every {MEMORY} steps, by the environment")
    first = Run("first")
    runs.append(first)
    say(f"  $ python -m mlflashpoint.run -m torch.distributed.run --nproc-per-node={RANKS} demo/train.py ...")
    first.wait(lambda: all(KILL_AFTER in first.state(rank) for rank in range(RANKS)), f"reach step {KILL_AFTER}")
    newest = KILL_AFTER - KILL_AFTER % MEMORY

    def committed() -> bool:
        return {line["rank"] for line in first.lines("commit") if line["step"] >= newest} == set(range(RANKS))

    first.wait(committed, f"commit step {newest}")
    first.kill()
    reached = min(max(first.state(rank)) for rank in range(RANKS))
    say(f"killed every process with SIGKILL after step {reached}")

    second = Run("second")
    runs.append(second)
    say("  the same command again")
    second.wait(lambda: second.process.poll() == 0, "train to its end")
    resumed = {second.events(rank, "start")[0]["step"] for rank in range(RANKS)}
    if len(resumed) != 1 or max(resumed) <= 0:
        raise DemoError(f"the ranks went on at steps {sorted(resumed)}")
    step = resumed.pop()
    say(f"resumed at step {step}, trained to step {max(second.state(0))}")

    both = sorted(set(first.state(0)) & set(second.state(0)))
    for rank in range(RANKS):
        check(first.state(rank), second.state(rank), both, rank)
    say(f"weights, optimizer, scheduler, counters: digests equal the killed run's after steps {both}, on every rank")

    memory, durable = ({**first.blocking(kind), **second.blocking(kind)} for kind in ("non_persistent", "durable"))
    stored = sum(line["bytes"] for line in first.lines("save") if line["step"] == newest)
    say(f"training stood still for (milliseconds, slowest rank; {stored / 2**20:.0f} MiB in all ranks together)")
    for name, values in (("memory saves", memory), ("durable saves", durable)):
        shown = ", ".join(f"{value:.0f} (step {at})" for at, value in sorted(values.items()))
        say(f"  {name:<14} median {statistics.median(values.values()):>6.0f}: {shown}")
    ratio = statistics.median(durable.values()) / statistics.median(memory.values())
    say(f"demo: ok, resumed at step {step} of {STEPS}, {ratio:.1f}x")


def check(killed: dict[int, Any], resumed: dict[int, Any], steps: list[int], rank: int) -> None:
    for step in steps:
        # Making a data loader draws from torch's generator, with or without us, so it is equal only up to the load.
        ours, theirs = ({**state[step], "rng": {**state[step]["rng"], "torch": None}} for state in (resumed, killed))
        if ours != theirs:
            names = [name for name in ours if ours[name] != theirs[name]]
            raise DemoError(f"after step {step} rank {rank} has other {', '.join(names)} than the killed run had")


if __name__ == "__main__":
    sys.exit(main())
