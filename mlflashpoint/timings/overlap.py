"""Whether two logs hold some of the same saves: rotated logs, two collections of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

#: saves in a row that are no coincidence
_SURE = 3
#: a few equal numbers more than chance gives are chance too
_MARGIN = 3


class Told(NamedTuple):
    """A save as a log tells it, equal only for the same save in another log, or by chance.

    Attributes:
        timer: its timer.
        step: training step, None if the log does not tell.
        values: its numbers.
    """

    timer: str
    step: int | None
    values: Hashable


class Overlap(NamedTuple):
    """What two logs have in common.

    Attributes:
        saves: saves that are equal to the last digit; 0 if there are no more of them than chance explains.
        sure: whether so many stand in a row that it is no chance.
    """

    saves: int
    sure: bool


class Series:
    """The saves of a log in its order, ready to be held against those of others."""

    def __init__(self, saves: Sequence[Told]) -> None:
        self._saves = saves
        self._all = frozenset(saves)
        self._steps = Counter((save.timer, save.step) for save in saves)
        self._chance = _chances(saves)

    def overlap(self, other: Series) -> Overlap:
        """What this log and ``other`` have in common."""
        if self._all.isdisjoint(other._all):
            return Overlap(0, False)
        common = longest = row = 0
        expected = 0.0
        for save in self._saves:
            rivals = other._steps.get((save.timer, save.step), 0)
            if not rivals:
                continue
            row = row + 1 if save in other._all else 0
            common += row > 0
            longest = max(longest, row)
            expected += rivals * max(self._chance[save.timer], other._chance[save.timer])
        if common < _MARGIN * expected:
            return Overlap(0, False)
        return Overlap(common, longest >= _SURE)


def _chances(saves: Sequence[Told]) -> dict[str, float]:
    """How likely two different saves of a timer are to have the same numbers, told by those of one log."""
    values: dict[str, Counter[Hashable]] = {}
    for save in saves:
        values.setdefault(save.timer, Counter())[save.values] += 1
    chances = {}
    for timer, counts in values.items():
        total = counts.total()
        pairs = total * (total - 1)
        chances[timer] = sum(count * (count - 1) for count in counts.values()) / pairs if pairs else 0.0
    return chances
