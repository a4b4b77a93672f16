"""The whole way as a user goes it: torchrun under the launcher, kill -9 to all of it, and the same command again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.adapter.megatron_bridge.conftest import NEWEST, Memory, at, state
from tests.adapter.megatron_bridge.fleet import HERE, OVERLAYS, RANKS, START_S, Run, environment, torchrun


class Launch:
    """One command with its ranks, none of which is left at the end."""

    def __init__(
        self, folder: Path, request: dict, settings: dict[str, str], *, version: str = NEWEST, ranks: int = RANKS
    ):
        folder.mkdir()
        self.folder = folder
        request = {"record": str(folder / "record."), "deadline_s": START_S, "options": {}, **request}
        (folder / "request.json").write_text(json.dumps(request))
        launcher = torchrun(ranks)
        script = [str(HERE / "train.py"), str(folder / "request.json")]
        command = [launcher[0], "-m", "mlflashpoint.run", *launcher[1:], *script]
        self._log = open(folder / "log", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=environment(version, settings, bootstrap=False),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def events(self, rank: int, kind: str | None = None) -> list[dict]:
        path = Path(self.folder, f"record.{rank}")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def wait_for(self, kind: str) -> None:
        give_up = time.monotonic() + START_S
        while not all(self.events(rank, kind) for rank in range(RANKS)):
            assert self.process.poll() is None and time.monotonic() < give_up, self.log[-4000:]
            time.sleep(0.1)

    def wait(self) -> int:
        return self.process.wait(START_S)

    def workers(self) -> list[int]:
        """Processes below the launcher; torchrun makes each a session of its own."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return list(map(int, children.read_text().split())) if children.exists() else []

    def kill(self) -> None:
        victims = [self.process.pid, *self.workers()]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)
        self._log.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    made: list[Launch] = []

    def start(request: dict, settings: dict[str, str], **options: object) -> Launch:
        made.append(Launch(tmp_path / f"launch-{len(made)}", request, settings, **options))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def test_a_job_that_torchrun_starts_is_killed_and_goes_on_bit_for_bit(
    launch: Callable[..., Launch], memory: Memory, straight: Callable[..., Run]
) -> None:
    options = {"save": str(memory.durable), "load": str(memory.durable)}
    first = launch({"options": options, "hold_at": 4}, memory.environ())
    first.wait_for("holding")
    memory.wait_for(4)
    assert len(first.workers()) == RANKS
    first.kill()
    second = launch({"options": options}, memory.environ())
    assert second.wait() == 0, second.log[-4000:]
    for rank in range(RANKS):
        assert second.events(rank, "start")[0]["step"] == 4
        assert state(second.events(rank, "end")[0], "rng") == state(at(straight(), 6, rank), "rng")


def test_a_bridge_of_an_unknown_version_trains_on_without_us_and_the_log_says_so(
    launch: Callable[..., Launch], memory: Memory, tmp_path: Path
) -> None:
    """The newest Bridge, that says it is the one after it."""
    overlay = OVERLAYS / NEWEST
    disguise = tmp_path / "overlay"
    disguise.mkdir()
    for entry in overlay.iterdir():
        if not entry.name.startswith("megatron_bridge-"):
            (disguise / entry.name).symlink_to(entry)
    metadata = next(overlay.glob("megatron_bridge-*.dist-info")) / "METADATA"
    (disguise / "megatron_bridge-0.9.0.dist-info").mkdir()
    (disguise / "megatron_bridge-0.9.0.dist-info" / "METADATA").write_text(
        metadata.read_text().replace(f"\nVersion: {NEWEST}\n", "\nVersion: 0.9.0\n")
    )
    run = launch({"options": {"steps": 2}}, memory.environ(every=1), version=str(disguise), ranks=1)
    assert run.wait() == 0, run.log[-4000:]
    assert run.events(0, "end")[0]["step"] == 2
    # One line speaks for all patches; it names the first whose module was imported.
    told = re.findall(r"patch (bridge\.\w+) is skipped: megatron-bridge 0\.9\.0 is outside the tested range", run.log)
    assert len(told) == 1, run.log[-4000:]
    assert not memory.base.exists()
