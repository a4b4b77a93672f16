"""Claims: this process's holds on places in containers, one store for each place, and all closed at the end."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Protocol

from mlflashpoint.errors import FlashpointError, StoreClosedError, StoreInUseError


class Closable(Protocol):
    """What holds a claim."""

    def close(self) -> None:
        """Finish, bounded, and release the claim; may be called twice."""


class Claim:
    """A hold on the place of one rank, until it is released; of use in the process that made it alone.

    Args:
        base: the container, as the settings name it.
        group: the set of ranks that save together.
        rank: global rank within the group.
        number: tells apart the claims that the process has for one group and rank.
    """

    def __init__(self, base: Path, group: str, *, rank: int, number: int) -> None:
        self.group = group
        self.rank = rank
        self.number = number
        self._base = base
        self._pid = os.getpid()
        self._released = False

    @property
    def here(self) -> bool:
        """Whether this process is the one that made it, and no child of it."""
        return self._pid == os.getpid()

    @property
    def released(self) -> bool:
        """Whether it has been given up."""
        return self._released

    def release(self) -> bool:
        """Give it up; False if that has happened already, or is not this process's to do."""
        if self._released or not self.here:
            return False
        self._released = True
        return True

    def check(self) -> None:
        """Raises StoreClosedError if it is given up, FlashpointError as ``check_process``."""
        self.check_process()
        if self._released:
            raise StoreClosedError("the store is closed", path=self._base, remedy="make a new one")

    def check_process(self) -> None:
        """Raises FlashpointError in a forked child."""
        # Locks and threads of the parent don't work in a forked child, and the seat is the parent's.
        if not self.here:
            raise FlashpointError(
                f"the runtime belongs to process {self._pid}, this one was forked from it",
                remedy="save and resume in the training process",
            )


class Claims:
    """The claims of a process; thread-safe. Closes what still holds one when the interpreter ends."""

    def __init__(self) -> None:
        #: who holds a claim, also if nobody refers to it any more: it holds its place all the same
        self._held: dict[Hashable, tuple[Closable, Claim]] = {}
        self._lock = threading.Lock()
        atexit.register(self.close_all)

    def claim(self, holder: Closable, base: Path, group: str, *, rank: int, local_rank: int) -> Claim:
        """Keep ``holder`` as this process's only one for the seat in the container ``base``, until it has released it.

        Returns:
            a claim with the lowest number from 0 that none of the process's other ones of that group and rank has.

        Raises:
            StoreInUseError: another one that is open has the seat. It would wait for that in vain, and say to the other
                ranks that this one has no memory store.
        """
        path = os.path.realpath(base)
        place = os.getpid(), path, group, local_rank
        with self._lock:
            self._held = {at: held for at, held in self._held.items() if not held[1].released}
            if place in self._held:
                raise StoreInUseError(
                    f"this process already has a store for it, group {group!r}",
                    path=path,
                    rank=rank,
                    remedy="use that one, close it before (close_runtimes() closes all), or take another group "
                    "(group=)",
                )
            others = [claim for _, claim in self._held.values() if claim.here]
            taken = {claim.number for claim in others if (claim.group, claim.rank) == (group, rank)}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            claim = Claim(base, group, rank=rank, number=number)
            self._held[place] = holder, claim
            return claim

    def close_all(self) -> None:
        """Close every holder of a claim, bounded."""
        for holder, _ in list(self._held.values()):
            holder.close()


#: those of this process
CLAIMS = Claims()
