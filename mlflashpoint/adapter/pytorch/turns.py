"""Turns: saves of several threads through one writer, one after the other.

``dcp.async_save`` makes each save in a thread of its own. A script that does not wait for the one before has two of
them in one writer and one planner, whose state is that of a single save.
"""

from __future__ import annotations

import threading

from mlflashpoint.core.deadline import Deadline
from mlflashpoint.errors import DeadlineExceededError

#: a thread that has ended says nothing, so that who waits for it has to look
_LOOK_S = 0.02
#: longest wait for the thread of an ``async_save`` to begin; a stage that no save follows must not hold up others
_BEGIN_S = 5.0


class Turns:
    """Lets one thread save at a time.

    A turn ends with ``end``, with its thread, or with the next turn of the same thread. One that ``async_save`` has
    announced ends only with its thread: after the writer's part DCP still talks to the other ranks in it, and the next
    save would talk in between.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: threading.Thread | None = None
        self._lasting = False
        self._announcer: threading.Thread | None = None

    def announce(self, deadline_s: float) -> None:
        """Wait for all turns of other threads; another thread will begin one for this thread.

        Raises:
            DeadlineExceededError: one has not ended after ``deadline_s`` seconds.
        """
        with self._changed:
            self._await_free(deadline_s)
            self._owner, self._announcer = None, threading.current_thread()

    def begin(self, deadline_s: float) -> None:
        """Wait for all turns of other threads, and begin one; raises as ``announce``."""
        with self._changed:
            self._await_free(deadline_s)
            self._owner, self._lasting = threading.current_thread(), self._announcer is not None
            self._announcer = None
            self._changed.notify_all()

    def end(self) -> None:
        """End this thread's turn, unless it lasts as long as the thread."""
        with self._changed:
            if self._owner is threading.current_thread() and not self._lasting:
                self._owner = None
                self._changed.notify_all()

    @property
    def free(self) -> bool:
        """Whether no other thread has a turn, or is about to begin one."""
        with self._changed:
            return self._announcer is None and self._is_over()

    def withdraw(self) -> None:
        """What was announced is done elsewhere."""
        with self._changed:
            self._announcer = None
            self._changed.notify_all()

    def _await_free(self, deadline_s: float) -> None:
        deadline, begin = Deadline(deadline_s), Deadline(min(_BEGIN_S, deadline_s))
        me = threading.current_thread()
        while True:
            coming = self._announcer is me and not begin.passed
            if not coming and self._is_over():
                self._announcer = None if self._announcer is me else self._announcer
                return
            if deadline.passed:
                raise DeadlineExceededError(
                    f"an earlier save of this writer has not ended after {deadline_s:g} s",
                    setting="MLFLASHPOINT_DEADLINE_S",
                    remedy="wait for the future of dcp.async_save before the next save",
                )
            self._changed.wait(_LOOK_S)

    def _is_over(self) -> bool:
        owner = self._owner
        return owner is None or owner is threading.current_thread() or not owner.is_alive()
