"""One deadline for a call of several waits."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from mlflashpoint.errors import DeadlineExceededError

_LONGEST_S = 365 * 86400.0


class Deadline:
    """A point in time that every wait of one call shares.

    Args:
        timeout_s: seconds from now; must be a positive number.

    Raises:
        ValueError: ``timeout_s`` is not a positive number.
    """

    def __init__(self, timeout_s: float) -> None:
        if math.isnan(timeout_s) or timeout_s <= 0:
            raise ValueError(f"a timeout is a positive number of seconds, not {timeout_s!r}")
        self.timeout_s = min(float(timeout_s), _LONGEST_S)
        self._end = time.monotonic() + self.timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining_s == 0.0

    def left(self, waiting_for: str, *, rank: int | None = None) -> timedelta:
        """What is left, at least a millisecond, since engines take a zero timeout for "no timeout".

        Raises:
            DeadlineExceededError: nothing is left; says what was waited for.
        """
        remaining = self.remaining_s
        if remaining == 0.0:
            raise self.exceeded(waiting_for, rank=rank)
        return timedelta(milliseconds=max(1, math.ceil(remaining * 1000)))

    def exceeded(self, waiting_for: str, *, rank: int | None = None) -> DeadlineExceededError:
        return DeadlineExceededError(f"no {waiting_for} within {self.timeout_s:.3g} s", rank=rank)
