"""Saves that are in both arms: a log that went into each of them compares well, and says nothing."""

from __future__ import annotations

from collections import Counter

from mlflashpoint.timings.samples import TimingSet

#: fewer saves of two runs can have the same time by chance
_LEAST = 3
#: so can times that are as coarse as NeMo RL's
_COARSE_NS = 10_000_000

_Save = tuple[str, int, int]


def common_saves(one: TimingSet, other: TimingSet) -> tuple[str, ...]:
    """Names the two runs that share the most, if that is at least half of one of them; to the last digit."""
    mine, theirs = _runs(one), _runs(other)
    places: dict[_Save, list[int]] = {}
    for run, saves in theirs.items():
        for save in saves:
            places.setdefault(save, []).append(run)
    shared = Counter((run, place) for run, saves in mine.items() for save in saves for place in places.get(save, ()))
    for (run, place), count in shared.most_common():
        if count >= _LEAST and 2 * count >= min(len(mine[run]), len(theirs[place])):
            return (
                f"{count} saves are in both arms, equal to the last digit (run {run + 1} of {one.label}, run "
                f"{place + 1} of {other.label}): they are of one log",
            )
    return ()


def _runs(timings: TimingSet) -> dict[int, set[_Save]]:
    runs: dict[int, set[_Save]] = {}
    for timer, samples in timings.timers.items():
        for sample in samples:
            nanoseconds = round(sample.seconds * 1e9)
            place = sample.order if sample.step is None else sample.step
            if nanoseconds % _COARSE_NS:
                runs.setdefault(sample.run, set()).add((timer, place, nanoseconds))
    return runs
