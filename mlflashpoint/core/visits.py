"""Which versions this process has loaded: a save of a step that lies in memory already may come from an older one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

#: a store's visits that are kept; equal ones count as one
_KEPT = 64

#: group and base container
Place = tuple[str, str]


@dataclass(frozen=True)
class Visit:
    """One load of a version.

    Attributes:
        number: rises from load to load of this process.
        step: of the version.
        world_size: number of its shards.
        missed: shards of which some part was not read here.
    """

    number: int
    step: int
    world_size: int
    missed: frozenset[int]

    def is_whole(self, rank: int, world_size: int) -> bool:
        """Whether ``rank`` has read all of its shard: where every rank has, together they have read the version."""
        return world_size == self.world_size and rank not in self.missed


@dataclass(frozen=True)
class Back:
    """A rank's answer to where it comes from, if it saves a step that it has saved, after loading an older version.

    Attributes:
        step: of the version that it has loaded whole; None if that can't be told.
    """

    step: int | None

    def __str__(self) -> str:
        return "parts of older versions" if self.step is None else f"step {self.step}"


class Visits:
    """The loads of one process, and up to which of them its saves have heard of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._made: dict[Place, tuple[Visit, ...]] = {}
        self._heard: dict[Place, int] = {}

    def add(self, place: Place, step: int, world_size: int, missed: frozenset[int]) -> None:
        with self._lock:
            self._number += 1
            visit = Visit(self._number, step, world_size, missed)
            others = [v for v in self._made.get(place, ()) if (v.step, v.missed) != (step, missed)]
            self._made[place] = (*others, visit)[-_KEPT:]

    def seen(self) -> Mapping[Place, tuple[Visit, ...]]:
        """All that a save knows of that begins now; plain data, also for another process that makes the save."""
        with self._lock:
            return dict(self._made)

    def settle(self, place: Place, seen: Mapping[Place, tuple[Visit, ...]]) -> None:
        """A save that knew of ``seen`` was made: the next one does not come from any of those."""
        with self._lock:
            self._heard[place] = max([self._heard.get(place, 0), *(visit.number for visit in seen.get(place, ()))])

    def back(
        self, place: Place, step: int, seen: Mapping[Place, tuple[Visit, ...]], *, rank: int, world_size: int
    ) -> Back | None:
        """What was loaded since the last save, which was of ``step``; None for nothing older."""
        with self._lock:
            heard = self._heard.get(place, 0)
        since = [visit for visit in seen.get(place, ()) if visit.number > heard]
        whole = [index for index, visit in enumerate(since) if visit.is_whole(rank, world_size)]
        # What was loaded whole has replaced all that was loaded before.
        since = since[whole[-1] :] if whole else since
        if all(visit.step >= step for visit in since):
            return None
        steps = {visit.step for visit in since}
        return Back(steps.pop() if whole and len(steps) == 1 else None)


#: of this process, whichever objects load and save
VISITS = Visits()
