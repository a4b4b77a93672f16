"""Which state a restarted job goes on from, and what faults of the store do to the job. Newest Bridge only."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapter.megatron_bridge.conftest import Fleets, Memory, at, starts, state
from tests.adapter.megatron_bridge.fleet import RANKS, Run


@pytest.fixture
def options(memory: Memory) -> dict:
    return {"save": str(memory.durable), "load": str(memory.durable)}


def same_end(run: Run, straight: Run) -> None:
    for rank in range(RANKS):
        assert state(at(run, 6, rank), "rng") == state(at(straight, 6, rank), "rng")


def test_a_durable_checkpoint_that_is_newer_than_memory_wins(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    durable = {**options, "checkpoint": {"save_interval": 5}}
    memory.crash(fleets("on"), durable, memory.environ(), at=5, committed=4)
    resumed = fleets("on").run(durable, memory.environ())
    assert starts(resumed) == [5] * RANKS
    same_end(resumed, straight())


def test_memory_that_is_newer_than_a_durable_checkpoint_wins(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    durable = {**options, "checkpoint": {"save_interval": 3}}
    memory.crash(fleets("on"), durable, memory.environ(), at=4)
    resumed = fleets("on").run(durable, memory.environ())
    assert starts(resumed) == [4] * RANKS
    same_end(resumed, straight())


def test_memory_that_is_lost_altogether_leaves_the_durable_checkpoint(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    durable = {**options, "checkpoint": {"save_interval": 3}}
    memory.crash(fleets("on"), durable, memory.environ(), at=4)
    shutil.rmtree(memory.base)
    resumed = fleets("on").run(durable, memory.environ())
    assert starts(resumed) == [3] * RANKS
    same_end(resumed, straight())


def test_what_sigterm_drains_serves_when_all_memory_is_lost(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run], tmp_path: Path
) -> None:
    environ = memory.environ(drain_dir=tmp_path / "drain")
    run = fleets("on").start(options, environ, hold_at=4)
    run.wait_for("holding")
    memory.wait_for(4)
    run.signal(signal.SIGTERM)
    assert run.exit_codes() == [-signal.SIGTERM] * RANKS
    shutil.rmtree(memory.base)
    resumed = fleets("on").run(options, environ)
    assert starts(resumed) == [4] * RANKS
    assert "step 4 of incarnation 1 is complete in the drain directory" in resumed.log(0)
    same_end(resumed, straight())


def test_a_recipe_that_handles_sigterm_itself_saves_durably_and_drains(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run], tmp_path: Path
) -> None:
    handling = {**options, "train": {"exit_signal_handler": True}}
    environ = memory.environ(drain_dir=tmp_path / "drain")
    run = fleets("on").start(handling, environ, pause_at=4)
    run.wait_for("pausing")
    memory.wait_for(4)
    run.signal(signal.SIGTERM)
    run.go_on()
    run.finish()
    assert (memory.durable / "latest_checkpointed_iteration.txt").read_text() == "5"
    shutil.rmtree(memory.base)
    shutil.rmtree(memory.durable)
    resumed = fleets("on").run(handling, environ)
    assert starts(resumed) == [4] * RANKS
    same_end(resumed, straight())


def test_memory_that_one_rank_has_lost_leaves_the_durable_checkpoint_to_all(
    fleets: Fleets, memory: Memory, options: dict
) -> None:
    durable = {**options, "checkpoint": {"save_interval": 3}}
    memory.crash(fleets("on"), durable, memory.environ(), at=4)
    shutil.rmtree(memory.seat(1))
    assert starts(fleets("on").run(durable, memory.environ())) == [3] * RANKS


def test_a_second_crash_resumes_as_the_first_did(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    memory.crash(fleets("on"), options, memory.environ(), at=2)
    second = memory.crash(fleets("on"), options, memory.environ(), at=4)
    third = memory.crash(fleets("on"), options, memory.environ(every=1), at=5)
    fourth = fleets("on").run(options, memory.environ())
    assert [starts(run) for run in (second, third, fourth)] == [[2] * RANKS, [4] * RANKS, [5] * RANKS]
    same_end(fourth, straight())


def test_a_corrupted_shard_is_noticed_and_every_rank_takes_the_next_older_version(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    memory.crash(fleets("on"), options, memory.environ(), at=4)
    memory.corrupt(rank=1, step=4)
    resumed = fleets("on").run(options, memory.environ())
    assert starts(resumed) == [2] * RANKS
    assert "digest" in resumed.log(1)
    same_end(resumed, straight())


def test_a_rank_without_a_store_trains_on_and_no_version_is_stored(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    """None could become complete, so the other rank stages nothing: it skips, and says whose store is missing."""
    memory.base.mkdir(mode=0o700)
    in_the_way = memory.base.with_name(f"{memory.job_id}-file")
    in_the_way.touch()
    try:
        broken = {"1": {"MLFLASHPOINT_BASE_CONTAINER": str(in_the_way)}}
        first = fleets("on").start(options, memory.environ(), hold_at=4, environ_of_rank=broken)
        first.wait_for("holding")
        first.kill()
        assert memory.steps(rank=0) == {}
        resumed = fleets("on").run(options, memory.environ(), environ_of_rank=broken)
    finally:
        in_the_way.unlink()
    assert '"ok": false' in first.log(1)
    assert re.search(r"the ranks skip this save together: .*rank 1", first.log(0))
    assert starts(resumed) == [0] * RANKS
    same_end(resumed, straight())


def test_a_version_that_one_rank_could_not_store_is_never_chosen(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    """Rank 1's seat is out of reach from step 3 to the crash; then it is back, with what it held before."""
    run = fleets("on").start(options, memory.environ(), hold_at=5, pause_at=3)
    run.wait_for("pausing")
    memory.wait_for(2)
    seat, away = memory.seat(1), memory.seat(1).with_name("seat-1-away")
    seat.rename(away)
    seat.touch()
    run.go_on()
    run.wait_for("holding")
    memory.wait_for(4, range(1))
    run.kill()
    seat.unlink()
    away.rename(seat)
    assert set(memory.steps(rank=0)) == {2, 4}
    assert set(memory.steps(rank=1)) == {2}
    resumed = fleets("on").run(options, memory.environ())
    assert starts(resumed) == [2] * RANKS
    same_end(resumed, straight())


def test_a_store_that_is_too_small_on_one_rank_lets_training_go_on(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    """A limit of 128 KiB on files: the first save finds it out before a byte is written."""
    run = fleets("on").run(options, memory.environ(), file_limit_of_rank={"1": 128 << 10})
    assert run.log(1).count('"ok": false') == 3
    assert memory.steps(rank=1) == {}
    same_end(run, straight())


def test_asynchronous_durable_saves_and_memory_saves_live_together(
    fleets: Fleets, memory: Memory, options: dict, straight: Callable[..., Run]
) -> None:
    both = {**options, "checkpoint": {"save_interval": 3, "async_save": True}}
    run = memory.crash(fleets("on"), both, memory.environ(), at=4)
    assert "refusing to serialize" not in run.logs()
    resumed = fleets("on").run(both, memory.environ())
    assert starts(resumed) == [4] * RANKS
    same_end(resumed, straight())
    assert (memory.durable / "latest_checkpointed_iteration.txt").read_text() == "6"
