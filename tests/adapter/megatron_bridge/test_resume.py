"""A run of real Bridge under the agent is killed after step 4 and goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.adapter.megatron_bridge.conftest import NEWEST, Fleets, Memory, at, state
from tests.adapter.megatron_bridge.fleet import RANKS, Run

CASES = [
    (NEWEST, 1, "atomic"),
    (NEWEST, 1, "fully_parallel"),
    (NEWEST, 2, "atomic"),
    (NEWEST, 2, "fully_parallel"),
    ("0.5.1", 1, "fully_parallel"),
    ("0.5.1", 2, "atomic"),
    ("0.4.2", 1, "fully_parallel"),
    ("0.4.2", 2, "atomic"),
]


@dataclass
class Story:
    """A straight run, a run that was killed after step 4, and the run that went on."""

    straight: Run
    killed: Run
    resumed: Run


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"bridge-{case[0]}-tp{case[1]}-{case[2]}")
def story(
    request: pytest.FixtureRequest,
    fleets: Fleets,
    straight: Callable[..., Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Story]:
    version, tensor_parallel, algorithm = request.param
    memory = Memory(tmp_path_factory.mktemp("story") / "durable")
    options = {
        "tensor_parallel": tensor_parallel,
        "save": str(memory.durable),
        "load": str(memory.durable),
        "checkpoint": {"non_persistent_local_ckpt_algo": algorithm},
    }
    try:
        fleet = fleets("on", version)
        killed = memory.crash(fleet, options, memory.environ(), at=4)
        resumed = fleet.run(options, memory.environ())
        yield Story(straight(version, tensor_parallel=tensor_parallel), killed, resumed)
    finally:
        memory.remove()


def test_training_goes_on_at_the_step_of_the_last_memory_save(story: Story) -> None:
    starts = [story.resumed.events(rank, "start")[0]["step"] for rank in range(RANKS)]
    assert starts == [4] * RANKS


@pytest.mark.parametrize("part", ["samples", "flops", "weights", "optimizer", "scheduler"])
def test_what_training_goes_on_from_is_what_was_there_when_it_was_killed(story: Story, part: str) -> None:
    for rank in range(RANKS):
        assert story.resumed.events(rank, "start")[0][part] == at(story.killed, 4, rank)[part]


def test_every_random_generator_is_where_it_was_when_the_load_is_over(story: Story) -> None:
    for rank in range(RANKS):
        before = at(story.killed, 4, rank)["rng"]
        assert story.resumed.events(rank, "loaded")[0]["rng"] == before
        assert before != at(story.killed, 3, rank)["rng"]


def test_after_the_last_step_all_is_equal_to_a_run_that_nothing_interrupted(story: Story) -> None:
    for rank in range(RANKS):
        resumed, straight = at(story.resumed, 6, rank), at(story.straight, 6, rank)
        assert state(resumed, "rng") == state(straight, "rng")
        # Making a data loader draws from torch's generator, also without us; the others stay in step.
        assert {**resumed["rng"], "torch": ""} == {**straight["rng"], "torch": ""}


def test_the_killed_run_trained_as_the_straight_one_did(story: Story) -> None:
    for rank in range(RANKS):
        assert state(at(story.killed, 4, rank)) == state(at(story.straight, 4, rank))


def test_nothing_was_written_durably(story: Story) -> None:
    assert not Path(story.resumed.request["options"]["save"], "latest_checkpointed_iteration.txt").exists()
