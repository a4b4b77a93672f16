"""The modes ``observe`` and ``replace`` of the agent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.adapter.megatron_bridge.conftest import Fleets, Memory, at, starts, state
from tests.adapter.megatron_bridge.fleet import RANKS, Run


def observed(run: Run, rank: int = 0) -> list[tuple[str, int]]:
    """Kind and step of each save that the log tells the time of."""
    marker = "mlflashpoint observe "
    lines = [json.loads(line.partition(marker)[2]) for line in run.log(rank).splitlines() if marker in line]
    assert all(line["blocking_ms"] > 0 and line["rank"] == rank for line in lines)
    return [(line["kind"], line["step"]) for line in lines]


def durable_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def tracked(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def test_observe_times_every_save_and_changes_nothing(fleets: Fleets, memory: Memory, tmp_path: Path) -> None:
    """The recipe's own local checkpoints stay NVRx's."""
    options = {
        "save": str(memory.durable),
        "checkpoint": {
            "save_interval": 3,
            "non_persistent_save_interval": 2,
            "non_persistent_ckpt_type": "local",
            "non_persistent_local_ckpt_dir": str(tmp_path / "nvrx"),
        },
    }
    run = fleets("on").run(options, memory.environ(every=1, bridge_mode="observe"))
    for rank in range(RANKS):
        assert observed(run, rank) == [("non_persistent", 2), ("durable", 3), ("non_persistent", 4), ("durable", 6)]
    assert "mlflashpoint save" not in run.logs()
    assert not memory.base.exists()
    assert list((tmp_path / "nvrx").rglob("*.pt"))


@pytest.fixture
def options(memory: Memory) -> dict:
    durable = str(memory.durable)
    return {"save": durable, "load": durable, "checkpoint": {"save_interval": 1, "most_recent_k": 1}}


@pytest.fixture
def environ(memory: Memory) -> dict[str, str]:
    return memory.environ(every=None, bridge_mode="replace", bridge_durable_every_n_saves=3)


def test_replace_keeps_every_third_durable_save_and_resumes_from_the_newer_one_in_memory(
    fleets: Fleets, memory: Memory, options: dict, environ: dict[str, str]
) -> None:
    first = memory.crash(fleets("on"), options, environ, at=5)
    kinds = [kind for kind, _ in observed(first)]
    assert kinds == ["non_persistent", "non_persistent", "durable", "non_persistent", "non_persistent"]
    # Retention of one counts durable checkpoints alone: the two saves to memory since did not push it out.
    assert durable_steps(memory.durable) == [3]
    assert tracked(memory.durable) == 3
    second = fleets("on").run(options, environ)
    assert starts(second) == [5] * RANKS
    for rank in range(RANKS):
        assert state(at(second, 5, rank), "rng") == state(at(first, 5, rank), "rng")
    assert durable_steps(memory.durable) == [6]


def test_replace_resumes_from_the_last_durable_save_when_memory_is_lost(
    fleets: Fleets, memory: Memory, options: dict, environ: dict[str, str]
) -> None:
    memory.crash(fleets("on"), options, environ, at=5)
    shutil.rmtree(memory.base)
    assert starts(fleets("on").run(options, environ)) == [3] * RANKS


def test_replace_saves_a_step_durably_on_all_ranks_when_its_memory_save_failed_on_one(
    fleets: Fleets, memory: Memory, options: dict, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    broken = {"1": {"MLFLASHPOINT_BASE_CONTAINER": str(tmp_path / "file")}}
    keep_all = {**options, "checkpoint": {"save_interval": 1}, "steps": 3}
    run = fleets("on").run(keep_all, environ, environ_of_rank=broken)
    assert durable_steps(memory.durable) == [1, 2, 3]
    for rank in range(RANKS):
        assert [step for kind, step in observed(run, rank) if kind == "durable"] == [1, 2, 3]


def test_replace_leaves_a_durable_checkpoint_of_the_step_at_which_training_ends(
    fleets: Fleets, memory: Memory, options: dict, environ: dict[str, str]
) -> None:
    """Once because the recipe leaves at step 2, which is no third save, and once at the last step of all, step 4."""
    fleets("on").run({**options, "steps": 4, "train": {"exit_interval": 2}}, environ)
    assert tracked(memory.durable) == 2
    fleets("on").run({**options, "steps": 4}, environ)
    assert tracked(memory.durable) == 4


def test_a_training_that_leaves_at_a_memory_save_of_ours_leaves_a_durable_checkpoint_of_it(
    fleets: Fleets, memory: Memory, options: dict
) -> None:
    """Bridge takes the memory save for its last one. A job whose time is over may go on elsewhere, without memory."""
    rare = {**options, "checkpoint": {"save_interval": 5}, "steps": 6, "train": {"exit_interval": 4}}
    run = fleets("on").run(rare, memory.environ(every=2))
    assert observed(run) == [("non_persistent", 2), ("non_persistent", 4), ("durable", 4)]
    assert tracked(memory.durable) == 4


def test_a_recipe_with_an_interval_of_its_own_leaves_what_it_leaves_without_us(
    fleets: Fleets, memory: Memory, options: dict
) -> None:
    own = {"save_interval": 5, "non_persistent_save_interval": 2, "non_persistent_ckpt_type": "local"}
    run = fleets("on").run(
        {**options, "checkpoint": own, "steps": 6, "train": {"exit_interval": 4}}, memory.environ(every=None)
    )
    assert observed(run) == [("non_persistent", 2), ("non_persistent", 4)]
