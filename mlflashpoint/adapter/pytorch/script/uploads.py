"""The durable saves that go on behind ``async_save``; what the end of one means is noted before the next decision.

A future wakes whoever waits for it before it calls its callbacks. So a script that waits for one save, and begins the
next one at once, may come first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Uploads:
    """Those of one stream, on rank 0."""

    def __init__(self) -> None:
        # A future that has ended already calls back in the thread that adds it.
        self._lock = threading.RLock()
        self._open: dict[int, tuple[Any, Callable[[Any], None]]] = {}

    def add(self, future: Any, note: Callable[[Any], None]) -> None:
        """``note`` is called with ``future`` once, when that has ended; it raises nothing."""
        with self._lock:
            self._open[id(future)] = future, note
        future.add_done_callback(self._ended)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, all ends that there were are noted, and no other one is."""
        with self._lock:
            for future, _ in list(self._open.values()):
                if future.done():
                    self._ended(future)
            yield

    def _ended(self, future: Any) -> None:
        with self._lock:
            _, note = self._open.pop(id(future), (None, None))
            if note is not None:
                note(future)
