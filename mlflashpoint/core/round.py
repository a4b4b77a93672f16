"""One question that every rank answers, with one outcome for all: whoever settles it first settles it for everyone.

A round is a counter and one record in the job's store. A rank that is counted goes on as the others do, whatever
its own connection does then; one that can't tell whether it was counted settles the round itself, if nobody has. So
no rank enters a collective that another one stays out of.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlflashpoint.core.attendance import Attendance
from mlflashpoint.core.channel import Channel, poll
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.core.ranks import named
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError, StepError

T = TypeVar("T")

#: for a store that fails before this rank is surely counted: one without a host stays without
_UNSURE_S = 1.0
#: a store that fails is asked again after this, and then ever more rarely
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
#: tries that a rank has when its time is up
_LAST_TRIES = 3
#: a store that has failed for so long is gone, as at the end of a job whose first rank hosts it: on the only connection
#: that there is, and where others are tried
_LOST_S, _UNREACHABLE_S = 1.0, 10.0
#: for another connection at the first try, and at the later ones
_CONNECT_S, _LONGEST_CONNECT_S = 0.5, 10.0
#: every so-manieth look is one for whether the meeting is over
_LOOKS = 8
#: remedy
SAME_ID = "nothing was done; pass the same checkpoint id on all ranks"
_ALL: Any = object()
_OVER: Any = object()


@dataclass(frozen=True)
class Question:
    """What one rank brings to a round.

    Attributes:
        name: rounds of each name are counted; all ranks ask the same names in the same order.
        yes: what the round is settled with once all have come, plain data. Called on one rank; raises only PeerError.
        no: what it is settled with because of an error of ours, plain data.
        objection: what this rank settles it with at once; None if it comes.
        about: what the question is about, equal on all ranks; empty for nothing that they could differ in.
        vote: what the rank says; ``yes`` is told whether all say so.
        remedy: where the ranks differ in that.
        decides: whether this rank calls ``yes``; None for the one that comes last.
    """

    name: str
    yes: Callable[[bool], Any]
    no: Callable[[FlashpointError], Any]
    objection: Any = None
    about: str = ""
    remedy: str = SAME_ID
    vote: bool = True
    decides: bool | None = None


@dataclass(frozen=True)
class Settled:
    """How a round ended, the same on every rank.

    Attributes:
        outcome: of ``yes``, of ``no``, or an objection.
        over: some rank did not come, or can't tell whether it was counted: the ranks do not count on from here.
    """

    outcome: Any
    over: bool = False


def settle(
    channel: Channel,
    question: Question,
    *,
    rank: int,
    size: int,
    deadline: Deadline,
    over: Callable[[], bool] = lambda: False,
    renew: Callable[[], Channel] | None = None,
    heard: Callable[[Settled], None] | None = None,
) -> Settled | None:
    """One round; collective.

    Args:
        channel: its prefix is used for nothing else.
        question: what this rank asks.
        rank: this rank.
        size: number of ranks.
        deadline: longest wait for the others.
        over: whether the others ask something else by now.
        renew: makes the same channel on another connection.
        heard: told how it ended before anything else happens that could hang.

    Returns:
        how it ended; None if it never will, because of ``over``.

    Raises:
        PeerError: the store can't be reached; this rank is not counted, or the round was not to be settled.
    """
    one = _Round(channel, question, rank, size, deadline, over, renew)
    found = one.settled()
    if found is not None:
        if heard is not None:
            heard(found)
        one.tidy()
    return found


class _Round:
    def __init__(
        self,
        channel: Channel,
        question: Question,
        rank: int,
        size: int,
        deadline: Deadline,
        over: Callable[[], bool],
        renew: Callable[[], Channel] | None,
    ) -> None:
        self._channel, self._question, self._rank, self._size = channel, question, rank, size
        self._deadline, self._over, self._renew = deadline, over, renew
        self._connect_s = _CONNECT_S
        self._looks = 0
        self._failing_since: float | None = None
        self._attendance = Attendance(rank, size, deadline)

    def settled(self) -> Settled | None:
        question, deadline = self._question, self._deadline
        objection = question.objection
        if objection is None and question.about:
            objection = self._differs(question)
        if objection is not None:
            return self._settle(objection, self._soon())
        if not question.vote:
            # Before this rank is counted: whoever settles the round must know all votes.
            self._insist(lambda: self._channel.add("noes"), self._soon())
        if deadline.passed:
            # Nobody waits for this rank any more: counted now, it would let others go on without it.
            return self._settle_late()
        try:
            came = self._channel.add("came")
        except PeerError as error:
            unsure = self._soon()
            self._connect_again(unsure)
            return self._settle(question.no(error), unsure, over=True)
        found: Any = _ALL if question.decides is None and came == self._size else None
        if found is None:
            found = poll(self._look, deadline, world_size=self._size)
        if found is _OVER:
            return None
        if found is _ALL:
            return self._settle_all()
        return self._settle_late() if found is None else _settled(found)

    def tidy(self) -> None:
        """Take the keys away when all have read the outcome; raises nothing, for that is settled."""
        with contextlib.suppress(Exception):
            if self._channel.add("read") == self._size:
                self._channel.delete("about", "outcome", "noes", "came", "read")
                self._attendance.clear(self._channel)

    def _soon(self) -> Deadline:
        return Deadline(min(_UNSURE_S, self._deadline.remaining_s))

    def _look(self) -> Any:
        try:
            self._attendance.sign(self._channel)
            found = self._channel.read("outcome")
            if found is None and self._question.decides and self._channel.add("came", 0) == self._size:
                return _ALL
            self._looks += 1
            if found is None and self._looks % _LOOKS == 0 and self._over():
                # Written behind the outcome of a round that this one may be.
                found = self._channel.read("outcome")
                return _OVER if found is None else found
        except PeerError:
            if self._is_gone():
                raise
            self._connect_again(self._deadline)
            return None
        self._failing_since = None
        return found

    def _is_gone(self) -> bool:
        """Whether the store, which has just failed, has done so for too long."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        return now - self._failing_since > (_LOST_S if self._renew is None else _UNREACHABLE_S)

    def _differs(self, question: Question) -> Any:
        def look() -> Any:
            return self._channel.decide("about", [self._rank, question.about])

        raw = self._insist(look, self._soon())
        other, named = raw if isinstance(raw, list) and len(raw) == 2 else (None, None)
        if named == question.about:
            return None
        return question.no(
            StepError(
                f"the ranks are at different versions (rank {other}: {named}, rank {self._rank}: {question.about})",
                rank=self._rank,
                remedy=question.remedy,
            )
        )

    def _settle_all(self) -> Settled:
        unanimous = self._insist(lambda: self._channel.add("noes", 0), self._deadline) == 0
        return self._settle(self._question.yes(unanimous), self._deadline)

    def _settle_late(self) -> Settled:
        missing = self._size - self._insist(lambda: self._channel.add("came", 0), self._deadline)
        who: list[int] = []
        with contextlib.suppress(PeerError):
            who = self._attendance.missing(self._channel)
        told = f": {named(who)}" if len(who) == missing else ""
        late = DeadlineExceededError(
            f"{missing} of {self._size} ranks did not come within {self._deadline.seconds:g} s "
            f"({self._question.name}){told}",
            setting="MLFLASHPOINT_DEADLINE_S",
            remedy="look for a rank that is stuck, or has failed where the others have not",
        )
        return self._settle(self._question.no(late), self._deadline, over=True)

    def _settle(self, outcome: Any, deadline: Deadline, *, over: bool = False) -> Settled:
        return _settled(self._insist(lambda: self._channel.decide("outcome", [over, outcome]), deadline))

    def _insist(self, ask: Callable[[], T], deadline: Deadline) -> T:
        """What the store answers, asked again until the deadline, and a few times behind it; raises PeerError."""
        pause, left = _PAUSE_S, _LAST_TRIES
        while True:
            try:
                answer = ask()
                self._failing_since = None
                return answer
            except PeerError:
                left -= deadline.passed
                if left <= 0 or self._is_gone():
                    raise
            time.sleep(pause if left == _LAST_TRIES else _PAUSE_S)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            self._connect_again(deadline)

    def _connect_again(self, deadline: Deadline) -> None:
        """Talk on another connection, if there can be one in time: one that is broken stays so."""
        seconds = min(self._connect_s, deadline.remaining_s)
        if self._renew is None or not seconds:
            return
        # Each try that comes to nothing may leave a thread behind.
        self._connect_s = min(2 * self._connect_s, _LONGEST_CONNECT_S)
        with contextlib.suppress(FlashpointError):
            self._channel = bounded(self._renew, seconds, "connecting to the job's store")


def _settled(raw: Any) -> Settled:
    if not isinstance(raw, list) or len(raw) != 2:
        raise PeerError("an answer in the job's store is malformed")
    return Settled(raw[1], bool(raw[0]))
