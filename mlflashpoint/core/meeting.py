"""Where the ranks of one process group ask each other, round after round.

The store may outlive the ranks: torchrun keeps one for all restarts. So they meet first, under a name that only they
know, and each round lies below it. A round without all of them ends the meeting, which is written there for those who
come later: they hear how that round ended if it is theirs, and else meet the others anew with what they ask.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from dataclasses import dataclass, field

from mlflashpoint.core.channel import Channel, Store
from mlflashpoint.core.connection import drop, renewed
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.core.roster import meet
from mlflashpoint.core.round import Question, Settled, settle
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError

#: below a meeting's name: which question ended it, what that was about, and how it ended
_OVER = "over"
_CONNECT_S = 0.5


@dataclass
class _Place:
    """One meeting, as long as it lasts.

    Attributes:
        channel: under a name that nobody else has.
        store: the process group's.
        pid: a forked child is none of the ranks.
        rounds: how often each question was asked.
    """

    channel: Channel
    store: weakref.ref[Store]
    pid: int
    rounds: Counter[str] = field(default_factory=Counter)

    def is_of(self, store: Store) -> bool:
        return self.store() is store and self.pid == os.getpid()

    def connect_again(self) -> Channel:
        """The same channel, on a new connection if there can be one."""
        store = self.store()
        if store is not None:
            self.channel = self.channel.on(renewed(store, self.channel.connection))
        return self.channel


class Meeting:
    """The rounds of the ranks of one process group; used by one thread.

    Args:
        prefix: what the keys begin with; no group's, which begin with ``mlflashpoint/``.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._place: _Place | None = None

    @property
    def channel(self) -> Channel | None:
        """Talk below the meeting's name; None where the ranks have yet to meet."""
        return None if self._place is None else self._place.channel

    def ask(
        self, store: Store, question: Question, *, rank: int, size: int, deadline_s: float, limit_s: float
    ) -> Settled:
        """One round; collective.

        Args:
            store: the process group's.
            question: what this rank asks.
            rank: this rank.
            size: number of ranks.
            deadline_s: longest wait for the others, meeting them included.
            limit_s: when a call that hangs is left behind; more than ``deadline_s``.

        Raises:
            DeadlineExceededError: the ranks could not meet in time, or the store does not answer.
            PeerError: the store can't be reached.
        """
        known = self._place if self._place is not None and self._place.is_of(store) else None
        talk = _Talk(self._prefix, store, known, question, rank, size, Deadline(deadline_s))
        # Whatever is raised: who has left a round does not count on with those who have not.
        self._place = None
        try:
            bounded(talk.run, limit_s, f"asking all ranks ({question.name})")
        except DeadlineExceededError:
            if talk.runs and talk.place is not None:
                drop(store, talk.place.channel.connection)
            # What hangs behind the outcome is no reason to stay out of what the others do.
            if talk.settled is None:
                raise
        settled = talk.settled
        assert settled is not None
        self._place = None if settled.over else talk.place
        return settled


class _Talk:
    """One round, in a thread of its own.

    Attributes:
        place: where the ranks are, None while they have yet to meet.
        settled: how it ended, None while that is not known.
        runs: False once nothing of it can hang.
    """

    def __init__(
        self,
        prefix: str,
        store: Store,
        known: _Place | None,
        question: Question,
        rank: int,
        size: int,
        deadline: Deadline,
    ) -> None:
        self._prefix, self._store, self._question = prefix, store, question
        self._rank, self._size, self._deadline = rank, size, deadline
        self.place = known
        self.settled: Settled | None = None
        self.runs = True

    def run(self) -> None:
        try:
            # Where the others ask something else, or are about to, they meet anew; the deadline ends that.
            while self.settled is None:
                if self.place is None:
                    self.place = self._met()
                self._asked(self.place)
        finally:
            self.runs = False

    def _asked(self, place: _Place) -> None:
        question = self._question
        place.rounds[question.name] += 1
        key = f"{question.name}/{place.rounds[question.name]}"

        def hear(settled: Settled) -> None:
            self.settled = settled
            if settled.over:
                with contextlib.suppress(PeerError):
                    place.channel.decide(_OVER, [key, question.about, settled.outcome])

        over = self._over(place)
        if over is None and settle(
            place.channel.under(key),
            question,
            rank=self._rank,
            size=self._size,
            deadline=self._deadline,
            over=lambda: place.channel.read(_OVER) is not None,
            renew=lambda: place.connect_again().under(key),
            heard=hear,
        ):
            return
        over = over or self._over(place)
        if isinstance(over, list) and len(over) == 3 and over[:2] == [key, question.about]:
            self.settled = Settled(over[2], over=True)
        self.place = None

    def _over(self, place: _Place) -> object:
        try:
            return place.channel.read(_OVER)
        except PeerError:
            # A connection that has broken since the last question is no reason to miss this one.
            with contextlib.suppress(FlashpointError):
                bounded(place.connect_again, _CONNECT_S, "connecting to the job's store")
            return place.channel.read(_OVER)

    def _met(self) -> _Place:
        """Raises as ``roster.meet`` does."""
        channel = Channel(self._store, self._prefix)
        name = meet(
            channel.under("start"),
            rank=self._rank,
            world_size=self._size,
            deadline_s=self._deadline.remaining_s,
            about=f"{self._question.name} {self._question.about}",
        )
        return _Place(channel.under(f"run-{name}"), weakref.ref(self._store), os.getpid())
