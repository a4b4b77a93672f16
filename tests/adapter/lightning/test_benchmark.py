"""What the benchmark takes for a missed promise."""

from __future__ import annotations

import copy

import pytest

from benchmarks.lightning import missed

KEPT = {
    "blocking": {"llm": {"ratio": 20.0}},
    "hooks": {"ours_us": 12.0, "empty_us": 11.0, "part": 1.09},
    "overhead": {"width 64": {"agent": [20.0, 5.0, 35.0], "control": [-80.0, -118.0, -42.0]}},
}


def test_what_two_processes_without_the_agent_differ_by_is_no_overhead():
    assert missed(KEPT) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("blocking", "llm", "ratio"), 4.9, "only 4.9 times as long, promised 5"),
        (("hooks", "part"), 1.51, "hooks: 1.51 times an empty callback's time, promised 1.5"),
        (
            ("overhead", "width 64", "agent"),
            [150.0, 119.0, 181.0],
            "at least +119 us per step, where noise is up to 118",
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
