"""How long a save waits for a slot, and then for the answer of the job's store."""

from types import SimpleNamespace

import pytest

from mlflashpoint.core.slotwait import SlotWait
from mlflashpoint.core.ticket import Ticket
from mlflashpoint.errors import SlotBusyError


def waits(world_size, *, times, busy_wait_s=5.0, certain=False, storeless=""):
    """What so many saves in a row, all in vain, wait for: a slot, and if that is not certain the answer."""
    asked = []
    gate = SimpleNamespace(
        enter=lambda step: None, verdict=lambda: None, give_up=lambda why, opening: certain, reason=""
    )
    settlement = SimpleNamespace(
        gate=gate,
        world_size=world_size,
        await_slot=lambda ticket: None,
        slot_awaited=lambda: None,
        storeless=storeless,
    )
    pool = SimpleNamespace(take=lambda wait_s, verdict: asked.append(wait_s), available=lambda: False)
    worker = SimpleNamespace(submit=lambda job: True, wake=lambda: None)
    wait = SlotWait(SimpleNamespace(busy_wait_s=busy_wait_s), pool, settlement, worker, None)
    for step in range(times):
        with pytest.raises(SlotBusyError):
            wait.check()
            wait.take(Ticket(step, 0, ""))
    return [wait_s for wait_s in asked if wait_s]


def test_a_wait_in_vain_is_halved_each_further_time_and_so_is_that_for_the_answer():
    assert waits(2, times=3) == [5.0, 2.0, 2.5, 1.0, 1.25, 0.5]
    assert waits(2, times=11)[-2:] == [0.25, 0.25]


def test_nothing_is_waited_for_where_a_rank_has_no_store():
    assert waits(2, times=2, storeless="rank 1 has no memory store") == []


def test_who_can_skip_by_itself_waits_for_no_answer():
    assert waits(2, times=2, certain=True) == [5.0, 2.5]


@pytest.mark.parametrize(("world_size", "shortest_s"), [(1000, 0.25), (5000, 0.765), (20_000, 3.015)])
def test_no_wait_is_shorter_than_three_looks_at_the_store(world_size, shortest_s):
    assert waits(world_size, times=11)[-2:] == pytest.approx([shortest_s] * 2)


def test_a_setting_below_the_shortest_wait_is_kept():
    assert waits(20_000, times=1, busy_wait_s=0.1, certain=True) == [0.1]
