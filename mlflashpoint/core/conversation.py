"""What the training thread says to the other ranks: collective calls, each with a deadline, none stuck in a socket."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.core.depot import Depot
from mlflashpoint.core.ledger import agree
from mlflashpoint.core.planner import Wish
from mlflashpoint.core.record import ShardCopy
from mlflashpoint.core.recovery import Decision, Recovery, recover, sources_of
from mlflashpoint.core.roster import Joined
from mlflashpoint.core.session import Session
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, in_words

log = logging.getLogger("mlflashpoint.core")

T = TypeVar("T")

#: the inner deadlines tell who is missing; the outer one only guards against a call that never comes back
_SLACK_S = 10.0
#: recoveries whose plans can still be asked where a shard is
_KEPT = 3


class Conversation:
    """The collective calls of one runtime; all ranks make the same ones in the same order.

    Args:
        session: an opened session.
        depot: access to the copies.
    """

    def __init__(self, session: Session, depot: Depot) -> None:
        self._session = session
        self._depot = depot
        self._agreements: Counter[str] = Counter()
        self._recoveries = 0
        self._reason = ""
        self._kept: deque[Channel] = deque()

    def agree(self, key: str, ok: bool) -> tuple[bool, str]:
        """Whether every rank says ``ok``, and why not; raises FlashpointError if the ranks can't talk."""
        ranks, deadline_s = self._session.ranks, self._session.config.deadline_s
        if ranks.world_size == 1:
            return ok, ""
        self._agreements[key] += 1
        name = f"agree/{key}/{self._agreements[key]}"
        # Joining, where that is not done yet, and the vote; a call that hangs in between is not to count later.
        whole = Deadline(2 * deadline_s)

        def vote() -> tuple[bool, str]:
            start = self._session.joined().start
            channel = self._session.channel().under(f"run-{start.run}/{name}")
            deadline = Deadline(min(deadline_s, whole.remaining_s))
            return agree(channel, ok, rank=ranks.rank, world_size=ranks.world_size, deadline=deadline)

        return self._bounded(vote, f"agreeing on {key}")

    def find(self, wish: Wish) -> Decision:
        """Decide what to go on from; raises FlashpointError."""
        self._recoveries += 1
        name = f"recovery-{self._recoveries}"

        def talk() -> Decision:
            joined = self._session.joined()
            where = f"run-{joined.start.run}/{name}"
            channel = self._session.channel().under(where).noting()
            self._kept.append(channel)
            decision = recover(self._session.room(channel), joined.me, joined.members, self._depot, wish)
            while len(self._kept) > _KEPT:
                # Every rank has been in the one before this, so none is in an older one any more.
                self._kept.popleft().forget()
            self._session.remember(decision.lineage)
            self._tell(decision.reason, joined)
            return decision.under(where)

        return self._bounded(talk, "finding what to resume from")

    def _tell(self, reason: str, joined: Joined) -> None:
        """Rank 0 says for all what was decided; a search that is made again with the same end is not told again."""
        if joined.me.rank != 0:
            return
        again, self._reason = reason == self._reason, reason
        without = [member.rank for member in joined.members if member.problem is not None]
        if not without:
            log.log(logging.DEBUG if again else logging.INFO, "recovery: %s", reason)
            return
        # Who asks takes it for a first start. What rank 0 itself lacks it has said when it started.
        level = logging.DEBUG if again or 0 in without else logging.ERROR
        log.log(level, "nothing can be loaded from memory, where there may be a version: %s", reason)

    def sources(self, recovery: Recovery, shard: int) -> tuple[ShardCopy, ...]:
        """The copies of any shard of the version; raises PeerError if the plan lists none."""
        known = recovery.sources.get(shard)
        if known is not None:
            return known
        return self._bounded(
            lambda: sources_of(self._session.channel().under(recovery.where), shard),
            f"asking where the shard of rank {shard} is",
        )

    def _bounded(self, action: Callable[[], T], what: str) -> T:
        # Joining and what follows are two conversations, each with the whole deadline for itself.
        seconds = 2 * self._session.config.deadline_s + _SLACK_S
        try:
            return bounded(action, seconds, what)
        except DeadlineExceededError as error:
            self._session.drop_channel()
            error.rank = self._session.ranks.rank if error.rank is None else error.rank
            raise
        except FlashpointError:
            raise
        except Exception as error:
            raise FlashpointError(f"{what} failed: {in_words(error)}") from error
