"""The runtimes of this process: one per group, found by whoever needs it, and closed at the end."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What a registry keeps."""

    @property
    def closed(self) -> bool:
        """Whether it can't be used any more."""

    def close(self) -> None:
        """Finish, bounded; may be called twice."""


T = TypeVar("T", bound=Closable)


class Registry(Generic[T]):
    """Thread-safe; closes what is still open when the interpreter ends.

    Args:
        make: makes the one for a group.
    """

    def __init__(self, make: Callable[[str], T]) -> None:
        self._make = make
        self._open: weakref.WeakSet[T] = weakref.WeakSet()
        self._by_group: dict[str, T] = {}
        self._lock = threading.Lock()
        atexit.register(self.close_all)

    def add(self, item: T) -> None:
        self._open.add(item)

    def get(self, group: str) -> T:
        """The one for ``group``, made at the first call and again when it has been closed."""
        with self._lock:
            found = self._by_group.get(group)
            if found is None or found.closed:
                found = self._by_group[group] = self._make(group)
            return found

    def close_all(self) -> None:
        with self._lock:
            self._by_group.clear()
        for item in list(self._open):
            item.close()
