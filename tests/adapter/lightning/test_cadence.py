"""When a memory save is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflashpoint.adapter.lightning.cadence import Cadence
from mlflashpoint.errors import SettingError


def due(cadence: Cadence, steps: list[int], start: int = 0) -> list[int]:
    cadence.start(start)
    return [step for step in steps if cadence.due(step)]


def test_every_third_step_is_due_and_step_0_is_not():
    assert due(Cadence(3), list(range(13))) == [3, 6, 9, 12]


def test_batches_that_only_accumulate_are_due_once():
    assert due(Cadence(2), [0, 1, 1, 2, 2, 2, 3, 3, 4]) == [2, 4]


def test_a_step_that_leaps_over_the_multiple_is_due():
    assert due(Cadence(4), [3, 6, 9, 12]) == [6, 9, 12]


def test_the_step_that_was_resumed_from_is_not_due_again():
    assert due(Cadence(3), [6, 7, 8, 9], start=6) == [9]


def test_steps_of_the_recipes_own_interval_are_left_to_it():
    assert due(Cadence(2, 6), list(range(1, 13))) == [2, 4, 8, 10]


@given(st.integers(1, 50), st.lists(st.integers(0, 3), max_size=200))
def test_one_save_per_interval_whatever_the_strides(every, strides):
    steps = [sum(strides[: end + 1]) for end in range(len(strides))]
    found = due(Cadence(every), steps)
    assert [step // every for step in found] == sorted({step // every for step in steps} - {0})


@pytest.mark.parametrize("arguments", [(0,), (-1,), (2, 0), (True,), (1.5,), ("3",)])
def test_an_interval_that_is_none_is_refused(arguments):
    with pytest.raises(SettingError, match="whole number from 1"):
        Cadence(*arguments)
