"""Deadlines: every wait has one, also a wait for a call that knows none of its own."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mlflashpoint.errors import DeadlineExceededError

T = TypeVar("T")

#: threads that wait for another action, of one process
_MOST_IDLE = 2


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
    """Run ``action`` in another thread and wait ``seconds`` at most; what it raises is raised here.

    A socket call of the job's store can't be told a deadline. When the time is up the thread is left behind, as a
    daemon that keeps nobody alive, and the caller goes on.

    Raises:
        DeadlineExceededError: ``action`` has not come back; ``what`` says what it was doing.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    _runner().run(run, ended)
    ended.wait(seconds)
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


def ready_for_the_end() -> None:
    """Have a thread for ``bounded`` while the interpreter ends: from 3.12 on Python starts none then."""
    if not _idle_runners():
        _Runner().park()


class _Runner:
    """A daemon thread that runs one action after the other."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="mlflashpoint-bounded", daemon=True).start()

    def run(self, action: Callable[[], None], ended: threading.Event) -> None:
        """Run ``action``, which raises nothing, and set ``ended``."""
        self._actions.put((action, ended))

    def park(self) -> bool:
        """Wait for another action; False if enough do."""
        idle = _idle_runners()
        if len(idle) >= _MOST_IDLE:
            return False
        idle.append(self)
        return True

    def _loop(self) -> None:
        goes_on = True
        while goes_on:
            action, ended = self._actions.get()
            action()
            # What the action holds is not to live until the next one.
            del action
            # Parked before the caller knows: its next action finds this thread.
            goes_on = self.park()
            ended.set()
            del ended


_idle: dict[int, list[_Runner]] = {}


def _idle_runners() -> list[_Runner]:
    # A forked child has no thread of its parent's.
    return _idle.setdefault(os.getpid(), [])


def _runner() -> _Runner:
    try:
        return _idle_runners().pop()
    except IndexError:
        return _Runner()
