"""The slots of this rank: allocated at its first save, larger when its state grows, and what else lies beside them."""

from __future__ import annotations

import logging
from pathlib import Path

from mlflashpoint.core.arena import Arena
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.orphans import free_orphans
from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.rotation import slots_needed
from mlflashpoint.core.session import Session
from mlflashpoint.core.standing import Standing
from mlflashpoint.core.worker import Worker
from mlflashpoint.errors import DeadlineExceededError, FlashpointError

log = logging.getLogger("mlflashpoint.core")

RARER = "save more rarely, or set MLFLASHPOINT_KEEP_VERSIONS=3 for one more slot"


class Slots:
    """The files, mapped; what they hold is the pool's business.

    Args:
        session: an opened session.
        pool: the book of these slots.
        standing: which versions of earlier starts count.
        worker: reads them in the background.
        exchange: keeps replicas beside them; None if there are none.
    """

    def __init__(
        self, session: Session, pool: SlotPool, standing: Standing, worker: Worker, exchange: Exchange | None
    ) -> None:
        self._session = session
        self._pool = pool
        self._standing = standing
        self._worker = worker
        self._exchange = exchange
        self._arena: Arena | None = None
        #: whether nothing is left here that earlier starts kept for ranks which now have other holders
        self._swept = False

    @property
    def allocated(self) -> bool:
        return self._arena is not None

    def prepare(self, seat: Path, nbytes: int) -> Arena:
        """Enough slots of that size.

        Raises:
            StoreFullError: there is no room for them.
            DeadlineExceededError: they are too small, and the last save is still under way.
        """
        count = slots_needed(self._session.config.keep_versions)
        if self._arena is None:
            arena = Arena(seat)
            try:
                arena.adopt()
                self._free_orphans(max(self._standing.found, default=None))
                arena.reserve(count, nbytes)
                self._adopt(arena, nbytes)
            except BaseException:
                arena.close()
                raise
            self._arena = arena
            self._standing.began = True
        elif any(slot.capacity < nbytes for slot in self._arena.slots):
            # Growing may move a slot, and the background must not be reading it then.
            if not self._worker.drain(self._session.config.busy_wait_s):
                raise DeadlineExceededError(
                    "the state has grown while the last save is still under way",
                    setting="MLFLASHPOINT_BUSY_WAIT_S",
                    remedy=RARER,
                )
            self._arena.reserve(count, nbytes)
        return self._arena

    def _adopt(self, arena: Arena, nbytes: int) -> None:
        """Take over what earlier starts left, with one slot to write into.

        All may hold the newest complete version: what a rank that sat here has saved of it, and what this one has
        fetched. Raises StoreFullError.
        """
        self._pool.adopt([slot.record for slot in arena.slots], self._standing.found)
        if not self._pool.available():
            arena.reserve(len(arena.slots) + 1, nbytes)
            self._pool.adopt([slot.record for slot in arena.slots], self._standing.found)

    def give_up(self, index: int) -> None:
        """Make sure that the slot of a save that failed half-way holds nothing, then let it be used again."""
        try:
            if self._arena is not None:
                self._arena.slots[index].invalidate()
        except (FlashpointError, OSError) as error:
            # The next save into the slot tries this again before it writes.
            log.warning("a failed save could not be taken back: %s", error)
        self._pool.freed(index)

    def sweep(self) -> None:
        """Once, when a version of this start is complete: nobody needs any more what earlier starts left elsewhere."""
        if not self._swept and self._standing.superseded:
            self._swept = True
            self._free_orphans(None)
            if self._exchange is not None:
                self._exchange.free_strays()

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
            self._standing.began = False

    def _free_orphans(self, newest: VersionKey | None) -> None:
        joined = self._session.joined_already
        if joined is not None and joined.me.leader:
            free_orphans(self._session.container.group_dir(self._session.group), newest)
