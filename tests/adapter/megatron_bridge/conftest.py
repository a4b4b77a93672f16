"""Fleets of workers shared by all tests here, and memory containers that are gone after each test."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlflashpoint.core.arena import scan_seat
from tests.adapter.megatron_bridge.fleet import DEADLINE_S, RANKS, VERSIONS, Fleet, Run, missing

NEWEST = "0.6.2"

#: what stands in the environment of each kind of fleet, and whether the agent's start-up file is found there
KINDS: dict[str, tuple[dict[str, str], bool]] = {
    "bare": ({}, False),
    "off": ({"MLFLASHPOINT_ENABLED": "0"}, True),
    "on": ({"MLFLASHPOINT_ENABLED": "1", "MLFLASHPOINT_LOG_LEVEL": "DEBUG"}, True),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the built environment there is nothing to test with; ``make test`` builds it and lets nothing skip.

    One Bridge version after the other, so that a fleet is imported once and few are in memory at a time.
    """
    ours = [place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    by_version = sorted((items[place] for place in ours), key=lambda item: version_of(item.nodeid), reverse=True)
    for place, item in zip(ours, by_version, strict=True):
        items[place] = item
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.multiprocess)
            if reason is not None and not os.environ.get("REQUIRE_FRAMEWORKS"):
                item.add_marker(pytest.mark.skip(reason=reason))


def version_of(name: str) -> tuple[int, ...]:
    """The Bridge version that a test's name tells, or the newest."""
    found = [version for version in VERSIONS if version in name]
    return tuple(map(int, (found[0] if found else NEWEST).split(".")))


class Fleets:
    """Fleets by version and kind, started when first asked for; those of another version end then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[tuple[str, str], Fleet] = {}

    def __call__(self, kind: str, version: str = NEWEST) -> Fleet:
        if (kind, version) not in self._running:
            self._end([key for key in self._running if key[1] != version])
            environ, bootstrap = KINDS[kind]
            folder = self._folder / f"{kind}-{version}-{len(list(self._folder.iterdir()))}"
            self._running[kind, version] = Fleet(folder, version, environ, bootstrap=bootstrap)
        return self._running[kind, version].ready()

    def close(self) -> None:
        self._end(list(self._running))

    def _end(self, keys: list[tuple[str, str]]) -> None:
        fleets = [self._running.pop(key) for key in keys]
        for fleet in fleets:
            fleet.stop()
        for fleet in fleets:
            fleet.close()


@pytest.fixture(scope="session")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    started = Fleets(tmp_path_factory.mktemp("fleets"))
    try:
        yield started
    finally:
        started.close()


@dataclass
class Memory:
    """A job's identity and its memory container, on this machine's tmpfs."""

    durable: Path
    job_id: str = field(default_factory=lambda: f"bridge-test-{uuid.uuid4().hex[:12]}")

    @property
    def base(self) -> Path:
        return Path("/dev/shm") / self.job_id

    def environ(self, every: int | None = 2, **settings: object) -> dict[str, str]:
        """Settings of a run of this job."""
        chosen = {
            "job_id": self.job_id,
            "base_container": self.base,
            "replicas": 0,
            "deadline_s": 60,
            "save_every_n_steps": every,
            **settings,
        }
        return {f"MLFLASHPOINT_{name.upper()}": str(value) for name, value in chosen.items() if value is not None}

    def seat(self, rank: int) -> Path:
        return self.base / "default" / f"seat-{rank}"

    def steps(self, rank: int) -> dict[int, Path]:
        """Committed steps on a rank's seat, each with the path of its slot."""
        return {slot.record.step: slot.path for slot in scan_seat(self.seat(rank)) if slot.record is not None}

    def corrupt(self, rank: int, step: int) -> None:
        """Flip bits in the middle of what a rank has stored of a step."""
        slot = next(slot for slot in scan_seat(self.seat(rank)) if slot.record is not None and slot.record.step == step)
        assert slot.record is not None
        with open(slot.path.with_suffix(".data"), "r+b") as file:
            # A stretch of it, so that it is not all padding.
            file.seek(slot.record.data_bytes // 2)
            stretch = file.read(8192)
            file.seek(slot.record.data_bytes // 2)
            file.write(bytes(byte ^ 1 for byte in stretch))

    def wait_for(self, step: int, ranks: range = range(RANKS)) -> None:
        """Wait until each of the ranks has committed ``step``."""
        give_up = time.monotonic() + DEADLINE_S
        while not all(step in self.steps(rank) for rank in ranks):
            assert time.monotonic() < give_up, f"step {step} was not committed: {[self.steps(rank) for rank in ranks]}"
            time.sleep(0.02)

    def crash(
        self,
        fleet: Fleet,
        options: dict,
        environ: dict[str, str],
        *,
        at: int,
        committed: int | None = None,
        **request: object,
    ) -> Run:
        """Train until after step ``at``, wait for every rank to commit that step (or ``committed``), kill them all."""
        run = fleet.start(options, environ, hold_at=at, **request)
        run.wait_for("holding")
        self.wait_for(at if committed is None else committed)
        run.kill()
        return run

    def remove(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    job = Memory(tmp_path / "durable")
    try:
        yield job
    finally:
        job.remove()


@pytest.fixture(scope="session")
def straight(fleets: Fleets) -> Callable[..., Run]:
    """Runs of six steps that nothing interrupts and that save nothing, by Bridge version and options; made once each.

    On the newest version they run without us. Importing a version twice over is too dear for the others: there the
    agent is on, with no cadence, which ``test_off`` shows to be the same.
    """
    made: dict[str, Run] = {}

    def get(version: str = NEWEST, **options: object) -> Run:
        key = repr((version, sorted(options.items())))
        if key not in made:
            made[key] = fleets("bare" if version == NEWEST else "on", version).run(dict(options))
        return made[key]

    return get


def at(run: Run, step: int, rank: int = 0) -> dict:
    """What the run recorded of its state after ``step`` steps, on its way or at its end."""
    found = [e for e in run.events(rank) if e["event"] in ("step", "end") and e["step"] == step]
    assert found, f"no record of step {step}: {run.events(rank)}"
    return found[0]


def state(event: dict, *without: str) -> dict:
    """The record without what names it, and without the parts named."""
    return {key: value for key, value in event.items() if key not in ("event", "time", *without)}


def starts(run: Run) -> list[int]:
    """The step at which each rank went on."""
    return [run.events(rank, "start")[0]["step"] for rank in range(RANKS)]
