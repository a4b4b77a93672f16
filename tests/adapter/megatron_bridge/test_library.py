"""The library form: a recipe that calls ``enable``, without the agent and under it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapter.megatron_bridge.conftest import Fleets, Memory, at, starts, state
from tests.adapter.megatron_bridge.fleet import RANKS


@pytest.mark.parametrize(("kind", "version"), [("bare", "0.6.2"), ("on", "0.6.2"), ("on", "0.4.2")])
def test_a_recipe_that_enables_the_library_resumes_bit_for_bit(
    fleets: Fleets, memory: Memory, straight: Any, kind: str, version: str
) -> None:
    options = {"save": str(memory.durable), "load": str(memory.durable)}
    plugin = "plugins:enable_as_a_library"
    first = memory.crash(fleets(kind, version), options, memory.environ(every=None), at=4, plugin=plugin)
    second = fleets(kind, version).run(options, memory.environ(every=None), plugin=plugin)
    assert starts(second) == [4] * RANKS
    for rank in range(RANKS):
        assert state(second.events(rank, "start")[0], "rng") == state(at(first, 4, rank), "rng")
        assert state(at(second, 6, rank), "rng") == state(at(straight(version), 6, rank), "rng")
        assert len(memory.steps(rank)) == 2
