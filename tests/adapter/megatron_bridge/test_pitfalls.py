"""Recipes in which Bridge alone would not save to memory, or would not resume from it. Newest Bridge, but for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapter.megatron_bridge.conftest import NEWEST, Fleets, Memory, at, starts, state
from tests.adapter.megatron_bridge.fleet import RANKS, Run


class Pretrained:
    """A durable checkpoint of six steps per Bridge version, and runs without us that begin with it."""

    def __init__(self, fleets: Fleets, folder: Path) -> None:
        self._fleets = fleets
        self._folder = folder
        self._made: dict[Any, Any] = {}

    def __call__(self, version: str = NEWEST) -> str:
        folder = self._folder / version
        if folder not in self._made:
            options = {"save": str(folder), "checkpoint": {"save_interval": 6}}
            self._made[folder] = self._run(version, options)
        return str(folder)

    def straight(self, version: str = NEWEST, **options: Any) -> Run:
        key = (version, repr(options))
        if key not in self._made:
            self._made[key] = self._run(version, {"checkpoint": {"pretrained_checkpoint": self(version)}, **options})
        return self._made[key]

    def _run(self, version: str, options: dict) -> Run:
        return self._fleets("bare" if version == NEWEST else "on", version).run(options)


@pytest.fixture(scope="module")
def pretrained(fleets: Fleets, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    return Pretrained(fleets, tmp_path_factory.mktemp("pretrained"))


def goes_on_at_4(first: Run, second: Run, straight: Run) -> None:
    assert starts(first) == [0] * RANKS
    assert starts(second) == [4] * RANKS
    for rank in range(RANKS):
        assert state(at(second, 4, rank), "rng") == state(at(first, 4, rank), "rng")
        assert state(at(second, 6, rank), "rng") == state(at(straight, 6, rank), "rng")


def test_a_recipe_that_saves_nowhere_saves_to_memory_and_resumes(fleets: Fleets, memory: Memory, straight: Any) -> None:
    first = memory.crash(fleets("on"), {"save": None}, memory.environ(), at=4)
    second = fleets("on").run({"save": None}, memory.environ())
    goes_on_at_4(first, second, straight())
    assert '"kind": "durable"' not in second.log(0)


def test_a_run_from_a_pretrained_checkpoint_resumes_and_does_not_begin_again(
    fleets: Fleets, memory: Memory, pretrained: Pretrained
) -> None:
    durable = str(memory.durable)
    options = {"save": durable, "load": durable, "checkpoint": {"pretrained_checkpoint": pretrained()}}
    first = memory.crash(fleets("on"), options, memory.environ(), at=4)
    second = fleets("on").run(options, memory.environ())
    goes_on_at_4(first, second, pretrained.straight())


def test_a_fine_tuning_run_resumes_and_does_not_begin_again(
    fleets: Fleets, memory: Memory, pretrained: Pretrained
) -> None:
    """The checkpoint to begin with is at step 6, which says nothing of this job's steps."""
    options = {"save": str(memory.durable), "load": pretrained(), "checkpoint": {"finetune": True}}
    first = memory.crash(fleets("on"), options, memory.environ(), at=4)
    second = fleets("on").run(options, memory.environ())
    goes_on_at_4(first, second, pretrained.straight())


@pytest.mark.parametrize(
    ("version", "loads"), [(NEWEST, True), (NEWEST, False), ("0.4.2", True)], ids=lambda value: str(value)
)
def test_a_lora_run_resumes_its_adapters(
    fleets: Fleets, memory: Memory, pretrained: Pretrained, version: str, loads: bool
) -> None:
    durable = str(memory.durable)
    adapters = {"lora": True, "checkpoint": {"pretrained_checkpoint": pretrained(version)}}
    options = {**adapters, "save": durable, "load": durable if loads else None}
    first = memory.crash(fleets("on", version), options, memory.environ(), at=4)
    second = fleets("on", version).run(options, memory.environ())
    goes_on_at_4(first, second, pretrained.straight(version, **adapters))


def test_a_checkpoint_that_the_recipe_names_by_its_step_is_loaded(fleets: Fleets, memory: Memory) -> None:
    options = {"save": str(memory.durable), "load": str(memory.durable), "checkpoint": {"save_interval": 3}}
    memory.crash(fleets("on"), options, memory.environ(), at=4)
    named = {**options, "checkpoint": {"save_interval": 3, "ckpt_step": 3}}
    second = memory.crash(fleets("on"), named, memory.environ(every=5), at=4, committed=4)
    assert starts(second) == [3] * RANKS
    # What was in memory above step 3 is of a past that training has left.
    third = memory.crash(fleets("on"), options, memory.environ(every=5), at=3, committed=4)
    assert starts(third) == [3] * RANKS


def test_another_parallel_layout_is_not_loaded_and_training_goes_on_as_without_us(
    fleets: Fleets, memory: Memory, straight: Any
) -> None:
    options = {"save": str(memory.durable), "load": str(memory.durable)}
    memory.crash(fleets("on"), options, memory.environ(), at=4)
    second = fleets("on").run({**options, "tensor_parallel": 2}, memory.environ())
    assert starts(second) == [0] * RANKS
    assert "saved with nothing else, the job now has tp=2" in second.log(0) or "tp=1" in second.log(0)
    for rank in range(RANKS):
        assert state(at(second, 6, rank), "rng") == state(at(straight(tensor_parallel=2), 6, rank), "rng")


def test_another_model_is_not_loaded_and_the_log_names_the_first_parameter_that_differs(
    fleets: Fleets, memory: Memory
) -> None:
    options = {"save": str(memory.durable), "load": str(memory.durable)}
    memory.crash(fleets("on"), options, memory.environ(), at=4)
    second = fleets("on").run({**options, "hidden": 64}, memory.environ())
    assert starts(second) == [0] * RANKS
    assert "model.decoder.final_layernorm.bias is stored with shape (32,), the model's is (64,)" in second.log(0)


def test_a_resume_that_left_a_parameter_out_is_reported(fleets: Fleets, memory: Memory) -> None:
    """Not with a distributed optimizer, which would put its own copy of the parameter back."""
    options = {"save": str(memory.durable), "load": str(memory.durable), "distributed_optimizer": False}
    memory.crash(fleets("on"), options, memory.environ(), at=4)
    second = fleets("on").run(options, memory.environ(), plugin="plugins:forget_a_bias_on_load")
    assert starts(second) == [4] * RANKS
    assert "these parameters do not hold what was stored: model.decoder.final_layernorm.bias" in second.log(0)
