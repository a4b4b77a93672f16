"""What the benchmark takes for a missed promise."""

from __future__ import annotations

import copy

import pytest

from benchmarks.lightning import _turned, interval, missed

KEPT = {
    "blocking": {"llm": {"ratio": 20.0}},
    "hooks": {"ours_us": 12.0, "empty_us": 11.0, "part": 1.09},
    "overhead": {
        "width 64": {
            "step_us": 600.0,
            "agent - none": [60.0, 45.0, 75.0],
            "agent - empty": [40.0, 25.0, 55.0],
            "control - none": [5.0, -30.0, 40.0],
        },
        "width 1024": {
            "step_us": 3000.0,
            "agent - none": [40.0, 25.0, 55.0],
            "agent - empty": [60.0, 45.0, 75.0],
            "control - none": [5.0, -30.0, 40.0],
        },
    },
}


def test_what_is_less_than_half_the_width_of_the_control_is_no_overhead():
    assert missed(KEPT) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("blocking", "llm", "ratio"), 4.9, "only 4.9 times as long, promised 5"),
        (("hooks", "part"), 1.51, "hooks: 1.51 times an empty callback's time, promised 1.5"),
        (
            ("overhead", "width 64", "agent - empty"),
            [50.0, 36.0, 64.0],
            "at least +36 us per step more than an empty callback, where noise is 35 us",
        ),
        (
            ("overhead", "width 1024", "agent - none"),
            [50.0, 36.0, 64.0],
            "at least +36 us per step more than no agent, where noise is 35 us",
        ),
        (
            ("overhead", "width 64", "control - none"),
            [-80.0, -118.0, -42.0],
            "differ by -118 to -42 us per step, which leaves open what the agent adds",
        ),
    ],
)
def test_a_missed_promise_is_said(path, value, said):
    found = copy.deepcopy(KEPT)
    place = found
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (text,) = missed(found)
    assert said in text


def test_what_was_not_measured_is_not_missed():
    assert missed({}) == []
    assert missed({"hooks": {**KEPT["hooks"], "part": 1.6}}) != []


def test_each_process_of_a_block_comes_first_as_often_as_the_others():
    names = ["agent", "none", "control"]
    orders = [_turned(names, number) for number in range(6)]
    assert sorted(order[0] for order in orders) == sorted(2 * names)
    assert all(sorted(order) == sorted(names) for order in orders)


def test_the_interval_of_few_blocks_is_as_wide_as_students_t_says():
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert (mean, round(high - mean, 3), round(mean - low, 3)) == (2.0, 2.484, 2.484)
