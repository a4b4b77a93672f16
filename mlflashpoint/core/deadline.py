"""Deadlines: every wait has one, also a wait for a call that knows none of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mlflashpoint.errors import DeadlineExceededError

T = TypeVar("T")


class Deadline:
    """A moment that a wait must not go beyond.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 once it has passed."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining_s == 0.0


def bounded(action: Callable[[], T], seconds: float, what: str) -> T:
    """Run ``action`` in a thread of its own and wait ``seconds`` at most; what it raises is raised here.

    A socket call of the job's store can't be told a deadline. When the time is up the thread is left behind, as a
    daemon that keeps nobody alive, and the caller goes on.

    Raises:
        DeadlineExceededError: ``action`` has not come back; ``what`` says what it was doing.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="mlflashpoint-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise DeadlineExceededError(
            f"{what} took longer than {seconds:g} s",
            setting="MLFLASHPOINT_DEADLINE_S",
            remedy="look for a rank that is stuck or a host that can't be reached",
        )
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
