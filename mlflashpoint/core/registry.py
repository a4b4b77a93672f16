"""The runtimes of this process: one per place, found by whoever needs it, and closed at the end."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mlflashpoint.errors import StoreInUseError


class Closable(Protocol):
    """What a registry keeps."""

    @property
    def closed(self) -> bool:
        """Whether it can't be used any more."""

    def close(self) -> None:
        """Finish, bounded; may be called twice."""


T = TypeVar("T", bound=Closable)


@dataclass(frozen=True)
class _Claim(Generic[T]):
    item: T
    kin: Hashable
    number: int


class Registry(Generic[T]):
    """Thread-safe; closes what is still open when the interpreter ends.

    Args:
        make: makes the one for a group.
    """

    def __init__(self, make: Callable[[str], T]) -> None:
        self._make = make
        #: what is open, also if nobody refers to it any more: it holds its place all the same
        self._open: dict[Hashable, _Claim[T]] = {}
        self._by_group: dict[str, T] = {}
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        atexit.register(self.close_all)

    def claim(self, item: T, base: str, group: str, *, rank: int, local_rank: int) -> int:
        """Keep ``item`` as this process's only one for the seat in the container ``base``, until it is closed.

        Returns:
            the lowest number from 0 that none of the process's other open ones of that group and rank has.

        Raises:
            StoreInUseError: another one that is open has the seat. It would wait for that in vain, and say to the other
                ranks that this one has no memory store.
        """
        place, kin = (os.getpid(), base, group, local_rank), (os.getpid(), group, rank)
        with self._claiming:
            self._open = {place: claim for place, claim in self._open.items() if not claim.item.closed}
            if place in self._open:
                raise StoreInUseError(
                    f"this process already has a store for it, group {group!r}",
                    path=base,
                    rank=rank,
                    remedy="use that one, close it before (close_runtimes() closes all), or take another group "
                    "(group=)",
                )
            taken = {claim.number for claim in self._open.values() if claim.kin == kin}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            self._open[place] = _Claim(item, kin, number)
            return number

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
        for claim in list(self._open.values()):
            claim.item.close()
