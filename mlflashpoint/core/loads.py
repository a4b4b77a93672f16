"""The loads of one rank: what the ranks find to go on from, and reading shards of it."""

from __future__ import annotations

import logging
from typing import Any

from mlflashpoint.core.conversation import Conversation
from mlflashpoint.core.depot import Depot
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.planner import Wish
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.recovery import Recovery
from mlflashpoint.core.results import Loaded
from mlflashpoint.core.session import Session
from mlflashpoint.core.standing import Standing

log = logging.getLogger("mlflashpoint.core")

#: loads that are remembered
_KEPT = 64


class Loads:
    """Finds and reads, until a slot that was read from may be overwritten.

    Args:
        session: an opened session.
        standing: which versions count.
        exchange: reaches other nodes.
        depot: access to the copies.
        conversation: talks to the other ranks.

    A load alone is no word of where training goes on from: a job may load an older version to compare it.
    """

    def __init__(
        self, session: Session, standing: Standing, exchange: Exchange, depot: Depot, conversation: Conversation
    ) -> None:
        self._session = session
        self._standing = standing
        self._exchange = exchange
        self._depot = depot
        self._conversation = conversation
        self._steps: list[int] = []

    def find(self, wish: Wish) -> Recovery | None:
        """Find with all ranks what to go on from, None for nothing; raises FlashpointError."""
        self.release()
        decision = self._conversation.find(wish)
        self._standing.rebase(decision.complete)
        ranks = self._session.ranks
        if decision.recovery is not None and decision.recovery.world_size == ranks.world_size:
            # Now, and not at the next save: until then one more loss would be the end of the version.
            self._depot.rebuild(decision.recovery.sources.get(ranks.rank, ()))
        log.debug("rank %d: %s", ranks.rank, decision.reason)
        return decision.recovery

    def load(self, recovery: Recovery, *, into: Any) -> Loaded:
        """Load this rank's shard, into a state of the same structure or, None, a new one; raises FlashpointError."""
        reader = self.shard(recovery, self._session.ranks.rank)
        try:
            state = reader.state(into=into)
            self.note(recovery.step)
            return Loaded(state, recovery.step, reader.attributes, reader.record)
        finally:
            reader.close()

    def shard(self, recovery: Recovery, rank: int) -> ShardReader:
        """A reader of any rank's shard that the caller closes; raises FlashpointError."""
        return self._depot.first_of(self._conversation.sources(recovery, rank), shard=rank, step=recovery.step)

    def note(self, step: int) -> None:
        """A version of ``step`` was loaded."""
        self._steps = [*(other for other in self._steps if other != step), step][-_KEPT:]

    def origin(self, step: int) -> int:
        """From where a job goes on that does not say it, and whose first save is of ``step``; -1 for from nothing.

        That is the newest version below which it has loaded, or else what it has loaded last.
        """
        below = [loaded for loaded in self._steps if loaded < step]
        return max(below) if below else next(reversed(self._steps), -1)

    def release(self) -> None:
        """Nothing is read here any more; nor on other nodes, once a save of this start is complete on all of them."""
        self._depot.close()
        if self._standing.superseded:
            self._exchange.withdraw()
