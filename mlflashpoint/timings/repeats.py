"""One sample per save, though a log can hold the same line several times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mlflashpoint.timings.blocks import Row

#: how far one copy of a log's lines may lag behind another, in saves of one timer
_LAG = 64


@dataclass
class _Seen:
    values: tuple[float, ...]
    streams: set[str]
    epoch: int


class RowFilter:
    """Tells a save that is logged a second time (through tee, two collectors, a repeated line) from a second save.

    The same numbers, to the last digit, are the same save
    - from another writer, if that one has not shown them yet: a copy of the log, with another prefix or none;
    - from the same writer, while the training has not gone on in between;
    - for the same training step, if the numbers are fine enough to tell two saves apart.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self._recent: dict[str, deque[_Seen]] = {}
        self._known: set[tuple[str, int, tuple[float, ...]]] = set()

    def is_copy(self, row: Row) -> bool:
        """Whether ``row`` repeats one before it."""
        epoch = row.moment.epoch
        recent = self._recent.setdefault(row.timer, deque(maxlen=_LAG))
        for seen in recent:
            if seen.values == row.values and (row.stream not in seen.streams or seen.epoch == epoch):
                seen.streams.add(row.stream)
                self.duplicates += 1
                return True
        recent.append(_Seen(row.values, {row.stream}, epoch))
        return False

    def is_known(self, row: Row, step: int | None) -> bool:
        """Whether the same step has shown the same numbers before."""
        if step is None:
            return False
        key = row.timer, step, row.values
        if key in self._known:
            self.duplicates += 1
            return True
        self._known.add(key)
        return False
