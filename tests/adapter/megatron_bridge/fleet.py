"""Starts the workers of ``zygote.py`` and asks them for runs; used by the tests, needs neither Bridge nor Megatron."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ENV = ROOT / ".envs" / "bridge"
OVERLAYS = ROOT / ".envs" / "bridge-overlays"
HERE = Path(__file__).parent
RANKS = 2
DEADLINE_S = 300.0
START_S = 900.0


class RunError(AssertionError):
    """A run did not do what the test needed of it; carries the end of its logs."""


@dataclass
class Run:
    """One training run of all ranks, as asked of a fleet."""

    fleet: Fleet
    number: int
    request: dict[str, Any]
    _events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def _file(self, kind: str, rank: int) -> Path:
        return self.fleet.folder / f"run-{self.number}.{kind}.{rank}"

    def events(self, rank: int, kind: str | None = None) -> list[dict[str, Any]]:
        path = Path(f"{self.request['record']}{rank}")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if kind in (None, event["event"])]

    def log(self, rank: int) -> str:
        path = self._file("log", rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        return "".join(f"---- rank {rank}\n{self.log(rank)}" for rank in range(RANKS))

    def pid(self, rank: int) -> int:
        self._wait(lambda: self._file("pid", rank).exists(), "start")
        return int(self._file("pid", rank).read_text())

    def exit_codes(self) -> list[int]:
        self._wait(lambda: all(self._file("exit", rank).exists() for rank in range(RANKS)), "end")
        return [int(self._file("exit", rank).read_text()) for rank in range(RANKS)]

    def finish(self) -> Run:
        """Wait for the end; raises RunError unless every rank ended well."""
        if self.exit_codes() != [0] * RANKS:
            raise RunError(f"exit codes {self.exit_codes()}\n{self.tail()}")
        return self

    def wait_for(self, kind: str) -> None:
        """Wait until every rank has recorded an event of this kind."""
        self._wait(lambda: all(self.events(rank, kind) for rank in range(RANKS)), f"record {kind!r}")

    def go_on(self) -> None:
        """Let a run go on that stands still at ``pause_at``."""
        Path(f"{self.request['record']}go").touch()

    def kill(self) -> None:
        """SIGKILL to every rank, as a crashed node does it: at once and with no last word."""
        self.signal(signal.SIGKILL)
        assert self.exit_codes() == [-signal.SIGKILL] * RANKS

    def signal(self, number: int) -> None:
        """Send it to every rank."""
        for rank in range(RANKS):
            os.kill(self.pid(rank), number)

    def tail(self, characters: int = 4000) -> str:
        return "".join(f"---- rank {rank}\n{self.log(rank)[-characters:]}\n" for rank in range(RANKS))

    def _wait(self, ready: Any, what: str) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not ready():
            ended = [rank for rank in range(RANKS) if self._file("exit", rank).exists()]
            if what not in ("start", "end") and ended:
                time.sleep(0.2)
                if ready():
                    return
                raise RunError(f"ranks {ended} ended and did not {what}\n{self.tail()}")
            if time.monotonic() > give_up or self.fleet.process.poll() is not None:
                self._abandon()
                raise RunError(f"the run did not {what} in {DEADLINE_S:.0f} s\n{self.tail()}\n{self.fleet.tail()}")
            time.sleep(0.02)

    def _abandon(self) -> None:
        for rank in range(RANKS):
            if self._file("pid", rank).exists() and not self._file("exit", rank).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(self._file("pid", rank).read_text()), signal.SIGKILL)


class Fleet:
    """The workers of one Bridge version, in one environment.

    Args:
        folder: where to keep everything.
        version: of Megatron Bridge.
        environ: additions to the environment.
        bootstrap: whether the agent's start-up folder is on PYTHONPATH.
    """

    def __init__(self, folder: Path, version: str, environ: dict[str, str], *, bootstrap: bool) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.version = version
        self._count = 0
        self._log = folder / "fleet.log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [*torchrun(), str(HERE / "zygote.py"), str(folder)],
                env=environment(version, environ, bootstrap=bootstrap),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self) -> Fleet:
        give_up = time.monotonic() + START_S
        while not all((self.folder / f"ready.{rank}").exists() for rank in range(RANKS)):
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise RunError(f"the workers did not start\n{self.tail()}")
            time.sleep(0.05)
        return self

    def start(self, options: dict[str, Any], environ: dict[str, str] | None = None, **request: Any) -> Run:
        """Ask for a run; returns at once."""
        self.ready()
        number, self._count = self._count, self._count + 1
        full = {
            "options": options,
            "environ": environ or {},
            "record": str(self.folder / f"record-{number}."),
            "port": free_port(),
            "deadline_s": DEADLINE_S,
            **request,
        }
        temporary = self.folder / "request.tmp"
        temporary.write_text(json.dumps(full))
        temporary.rename(self.folder / f"run-{number}.json")
        return Run(self, number, full)

    def run(self, options: dict[str, Any], environ: dict[str, str] | None = None, **request: Any) -> Run:
        """Ask for a run and wait for its good end."""
        return self.start(options, environ, **request).finish()

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:] if self._log.exists() else ""

    def stop(self) -> None:
        """Tell the workers to end, which takes them a moment."""
        (self.folder / "stop").touch()

    def close(self) -> None:
        """End the workers; torchrun's own signal handling ends them where they do not end by themselves."""
        self.stop()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
                return


def torchrun(ranks: int = RANKS) -> list[str]:
    return [
        str(ENV / "bin" / "python"),
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        f"--rdzv-id={os.getpid()}",
    ]


def environment(version: str, additions: dict[str, str], *, bootstrap: bool) -> dict[str, str]:
    """This process's environment without a trace of mlflashpoint, plus Bridge, the fixture and ``additions``."""
    path = [str(OVERLAYS / version), str(ROOT / "tools"), str(ROOT)]
    if bootstrap:
        path.insert(0, str(ROOT / "sitecustomize"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLASHPOINT_", "PYTHON"))}
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        # Bridge writes in the order of sets.
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FLEET_OWNER": str(os.getpid()),
        **additions,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def missing() -> str | None:
    """Why the tests can't run here, None if they can."""
    lacking = [str(path) for path in (ENV / "bin" / "python", *(OVERLAYS / v for v in VERSIONS)) if not path.exists()]
    return f"{', '.join(lacking)} not built: run tools/envs/bridge.sh" if lacking else None


VERSIONS = ("0.4.2", "0.5.1", "0.6.2")


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
