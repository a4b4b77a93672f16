"""What the agent leaves alone: a job with the agent off, and with the agent on all that is not a memory save."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.adapter.megatron_bridge.conftest import KINDS, Fleets, Memory, state
from tests.adapter.megatron_bridge.fleet import RANKS, ROOT, Run, remove


@dataclass
class Outcome:
    run: Run
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def outcomes(fleets: Fleets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """The same job, that saves durably at steps 3 and 6, with no bootstrap, with the agent off, and with it on.

    All three save into one folder, one after the other, because Bridge writes the folder's name into its files.
    """
    memory = Memory(tmp_path_factory.mktemp("off") / "durable")
    options = {"save": str(memory.durable), "checkpoint": {"save_interval": 3}, "verbose": True}
    found = {}
    try:
        for kind in (*KINDS, "bare again"):
            run = fleets(kind.split()[0]).run(options, memory.environ() if kind == "on" else {})
            found[kind] = Outcome(run, files_in(memory.durable))
            remove(memory.durable)
        yield found
    finally:
        memory.remove()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["off", "on"])
def test_every_step_of_training_is_bit_for_bit_the_job_without_us(outcomes: dict[str, Outcome], kind: str) -> None:
    for rank in range(RANKS):
        ours, bare = (
            [state(event) for event in outcomes[which].run.events(rank) if event["event"] != "done"]
            for which in (kind, "bare")
        )
        assert len(ours) > 6
        assert ours == bare


@pytest.mark.parametrize("kind", ["off", "on"])
def test_durable_checkpoints_are_the_same_byte_for_byte(outcomes: dict[str, Outcome], kind: str) -> None:
    """But for the bytes that are chance: Bridge stores padding that nobody has set, and torch a random name."""
    ours, bare, again = outcomes[kind].files, outcomes["bare"].files, outcomes["bare again"].files
    assert any(name.endswith(".distcp") for name in bare)
    assert set(ours) == set(bare)
    for name, data in bare.items():
        assert len(ours[name]) == len(data), name
        chance = differing(data, again[name])
        assert not chance or name.endswith((".distcp", ".metadata"))
        # Next to a byte of padding that differs lie others that happened to be the same twice.
        near = {place + away for place in chance for away in range(-128, 129)}
        assert len(near) < len(data) / 3
        assert differing(data, ours[name]) <= near, name


def differing(one: bytes, other: bytes) -> set[int]:
    """Places in which two equally long byte strings differ."""
    if one == other:
        return set()
    return {place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}


def test_with_the_agent_off_nothing_in_the_log_speaks_of_us(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["off"].run.log(0).count("\n") > 50
    assert "flashpoint" not in outcomes["off"].run.logs().lower().replace(str(ROOT).lower(), "")


def test_with_the_agent_on_there_were_memory_saves_beside_the_durable_ones(outcomes: dict[str, Outcome]) -> None:
    log = outcomes["on"].run.log(0)
    assert [step for step in (2, 4) if f'"kind": "non_persistent", "rank": 0, "step": {step}' in log] == [2, 4]
    assert [step for step in (3, 6) if f'"kind": "durable", "rank": 0, "step": {step}' in log] == [3, 6]


def test_bridge_still_logs_its_own_timer_of_a_memory_save(outcomes: dict[str, Outcome]) -> None:
    assert re.search(r"save-checkpoint-non-persistent \.+: \(\d+\.\d+, \d+\.\d+\)", outcomes["on"].run.log(RANKS - 1))
