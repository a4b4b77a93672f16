"""Axes: where a value lies, and which values to write on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: largest to smallest value from which on an axis is logarithmic
_LOGARITHMIC_FROM = 15.0


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Position of ``value`` on the axis, from 0 to 1."""
        if self.logarithmic:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @classmethod
    def of_times(cls, values: Sequence[float]) -> Scale:
        """Axis for times in seconds; from 0 if it is linear."""
        largest = max(values, default=0.0) or 1e-3
        smallest = min((value for value in values if value > 0), default=largest)
        if largest / smallest < _LOGARITHMIC_FROM:
            step = _step(largest / 5)
            count = math.ceil(largest / step * 1.0000001)
            return cls(0.0, count * step, False, tuple(step * index for index in range(count + 1)))
        low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
        marks = (1, 2, 5) if high - low <= 2 else (1, 3) if high - low <= 3 else (1,)
        ticks = [mark * 10.0**power for power in range(low, high + 1) for mark in marks]
        first = max((tick for tick in ticks if tick <= smallest), default=10.0**low)
        last = min((tick for tick in ticks if tick >= largest), default=10.0**high)
        return cls(first, last, True, tuple(tick for tick in ticks if first <= tick <= last))

    @classmethod
    def of_steps(cls, values: Sequence[int]) -> Scale:
        """Axis for whole numbers, with some room at both ends."""
        low, high = min(values), max(values)
        room = max((high - low) * 0.03, 0.5)
        step = max(1, round(_step((high - low) / 8 or 1)))
        first = math.ceil(low / step) * step
        return cls(low - room, high + room, False, tuple(range(first, high + 1, step)) or (low,))


def _step(rough: float) -> float:
    """The next larger of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(mark * power for mark in (1, 2, 2.5, 5, 10) if mark * power >= rough * 0.9999999)
