"""The runtimes of this process: one per place, found by whoever needs it, and closed at the end."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Hashable
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
        #: what is open, also if nobody refers to it any more: it holds its place all the same
        self._open: dict[Hashable, T] = {}
        self._by_group: dict[str, T] = {}
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        atexit.register(self.close_all)

    def claim(self, place: Hashable, item: T) -> bool:
        """Keep ``item`` at ``place`` until it is closed; False if another one is there that is still open."""
        with self._claiming:
            for old in [place for place, there in self._open.items() if there.closed]:
                del self._open[old]
            return self._open.setdefault(place, item) is item

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
        for item in list(self._open.values()):
            item.close()
