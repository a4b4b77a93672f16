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
#: a thread that has nothing left to do ends within this
_LEAVE_S = 1.0


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


def bounded(
    action: Callable[[], T],
    seconds: float,
    what: str,
    *,
    meanwhile: Callable[[], object] | None = None,
    every_s: float = 0.01,
) -> T:
    """Run ``action`` in another thread and wait ``seconds`` at most; what it raises is raised here.

    A socket call of the job's store can't be told a deadline. When the time is up the thread is left behind, as a
    daemon that keeps nobody alive, and the caller goes on.

    Args:
        action: what may take long.
        seconds: longest wait for it.
        what: says what it was doing.
        meanwhile: called here every ``every_s`` seconds; an action that is accompanied so knows a deadline of its own,
            and runs here where the interpreter, which ends, starts no thread any more.
        every_s: pause between two calls of ``meanwhile``.

    Raises:
        DeadlineExceededError: ``action`` has not come back.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    try:
        runner = _runner()
    except RuntimeError:
        if meanwhile is None:
            raise
        return action()
    deadline = Deadline(seconds)
    runner.run(run, ended)
    while meanwhile is not None and not deadline.passed and not ended.wait(min(every_s, deadline.remaining_s)):
        meanwhile()
    if ended.wait(deadline.remaining_s):
        runner.gone()
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
    """Have a thread for ``bounded`` while the interpreter ends: from 3.12 on Python starts none then.

    From here on this process keeps a thread or two for that; without this call each ends with its action.
    """
    if not _idle.setdefault(os.getpid(), []):
        _Runner().park()


class _Runner:
    """A daemon thread that runs one action after the other."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._parked = False
        self._thread = threading.Thread(target=self._loop, name="mlflashpoint-bounded", daemon=True)
        self._thread.start()

    def run(self, action: Callable[[], None], ended: threading.Event) -> None:
        """Run ``action``, which raises nothing, and set ``ended``."""
        self._actions.put((action, ended))

    def gone(self) -> None:
        """After an action: wait until the thread has ended, unless it waits for another one."""
        if not self._parked:
            self._thread.join(_LEAVE_S)

    def park(self) -> bool:
        """Wait for another action; False if enough do, or nobody asked for one that does."""
        idle = _idle.get(os.getpid())
        if idle is None or len(idle) >= _MOST_IDLE:
            return False
        self._parked = True
        idle.append(self)
        return True

    def _loop(self) -> None:
        goes_on = True
        while goes_on:
            action, ended = self._actions.get()
            self._parked = False
            action()
            # What the action holds is not to live until the next one.
            del action
            # Parked before the caller knows: its next action finds this thread.
            goes_on = self.park()
            ended.set()
            del ended


#: by process, because a forked child has no thread of its parent's; none until it is asked to be ready
_idle: dict[int, list[_Runner]] = {}


def _runner() -> _Runner:
    try:
        return _idle[os.getpid()].pop()
    except LookupError:
        return _Runner()
