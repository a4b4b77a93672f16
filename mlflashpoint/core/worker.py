"""The background thread of a runtime: finishes saves one after the other, and looks for verdicts in between."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("mlflashpoint.core")


class Worker:
    """Runs jobs in the order of their submission. The thread exists from the first job on, as a daemon.

    Args:
        name: of the thread.
        watch: called after each job and when ``watch``'s own pause is over; returns the seconds until it wants to be
            called again, or None if it has nothing to look for. Must not raise.
        limit: longest queue of jobs.
    """

    def __init__(self, name: str, watch: Callable[[], float | None], *, limit: int = 64) -> None:
        self._name = name
        self._watch = watch
        self._limit = limit
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._wake = False
        self._stopping = False

    @property
    def started(self) -> bool:
        return self._thread is not None

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue ``job``; False if the queue is full or the worker has been stopped."""
        with self._changed:
            if self._stopping or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wake(self) -> None:
        """Call ``watch`` as soon as possible."""
        with self._changed:
            self._wake = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is queued or running; False if ``timeout_s`` seconds did not suffice."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Let the queued jobs finish and end the thread; False if it is still busy after ``timeout_s`` seconds."""
        drained = self.drain(timeout_s)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and drained:
            self._thread.join(timeout_s)
        return drained

    def _run(self) -> None:
        due: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._jobs or self._stopping or self._wake,
                    None if due is None else max(0.0, due - time.monotonic()),
                )
                if self._stopping:
                    return
                self._wake = False
                job = self._jobs.popleft() if self._jobs else None
                self._busy = job is not None
            try:
                if job is not None:
                    job()
            except Exception:
                log.exception("a background job failed in a way that nobody foresaw")
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            pause = self._watch()
            due = None if pause is None else time.monotonic() + pause
