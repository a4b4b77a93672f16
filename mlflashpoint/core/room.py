"""A room: one collective conversation of all ranks, in which who does not answer is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlflashpoint.core.channel import Channel, poll
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.ranks import named
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError

T = TypeVar("T")

#: part of the deadline after which rank 0 gives up; it can name who is missing, so it has to be the first
FIRST_SHARE = 0.8


class Room:
    """One collective conversation: all ranks enter it, and it ends for all when one of them calls it off.

    Args:
        channel: talk under a prefix that only this conversation uses.
        rank: this rank.
        world_size: ranks that take part.
        deadline_s: longest time for the whole conversation, in seconds.
    """

    def __init__(self, channel: Channel, *, rank: int, world_size: int, deadline_s: float) -> None:
        self.channel = channel
        self.rank = rank
        self.world_size = world_size
        self._deadline = Deadline(deadline_s * (FIRST_SHARE if rank == 0 else 1.0))

    @property
    def remaining_s(self) -> float:
        """Seconds until this rank gives up."""
        return self._deadline.remaining_s

    def until(self, look: Callable[[], T | None], missing: Callable[[], Absent]) -> T:
        """Wait for ``look`` to find something.

        Raises:
            DeadlineExceededError: it did not in time, or some rank said so; the message is about ``missing()`` of that
                rank.
            PeerError: another rank called the conversation off, or the store can't be reached.
        """

        def peek() -> T | CalledOff | None:
            found = look()
            return found if found is not None else self._called_off()

        found = poll(peek, self._deadline, world_size=self.world_size)
        if found is None:
            absent = missing()
            found = self._call_off(
                CalledOff(True, f"{absent} within {self._deadline.seconds:g} s", tuple(absent.ranks))
            )
        if isinstance(found, CalledOff):
            raise found.error(self.rank)
        return found  # type: ignore[return-value]

    def enter(self) -> None:
        """Raises as ``until`` does if the others have ended the conversation before this rank came."""
        found = self._called_off()
        if found is not None:
            raise found.error(self.rank)

    def arrive(self, what: str) -> None:
        """Tell that this rank has done ``what``."""
        self.channel.post(f"{what}/{self.rank}", 1)
        self.channel.add(what)

    def all_arrived(self, what: str) -> None:
        """Wait until every rank has done ``what``; raises as ``until`` does, naming those that have not."""

        def missing() -> Absent:
            return Absent(self._late_for(what), what)

        self.until(lambda: True if self.channel.add(what, 0) >= self.world_size else None, missing)

    def held_up(self, *stages: str, then: str) -> Absent:
        """Whom a rank waits for that waits for rank 0 to have ``then``: rank 0 itself waits for all, stage by stage."""
        late = ((self._late_for(what), what) for what in stages)
        return next((Absent(ranks, what) for ranks, what in late if ranks), Absent([0], then))

    def call_off(self, text: str) -> CalledOff:
        """End the conversation for all ranks; the first reason given holds."""
        return self._call_off(CalledOff(False, text))

    def _call_off(self, proposal: CalledOff) -> CalledOff:
        return CalledOff.from_json(self.channel.decide("called_off", proposal.to_json()))

    def _late_for(self, what: str) -> list[int]:
        arrived = self.channel.read_present([f"{what}/{rank}" for rank in range(self.world_size)])
        return [rank for rank, found in enumerate(arrived) if found is None]

    def _called_off(self) -> CalledOff | None:
        raw = self.channel.read("called_off")
        return None if raw is None else CalledOff.from_json(raw)


@dataclass(frozen=True)
class CalledOff:
    """Why a conversation ended: a rank waited in vain, or gave up.

    Attributes:
        timed_out: whether it waited in vain.
        text: for whom, or why it gave up.
        absent: the ranks that it waited for.
    """

    timed_out: bool
    text: str
    absent: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, raw: Any) -> CalledOff:
        if not isinstance(raw, list) or [type(item) for item in raw] != [bool, str, list]:
            raise PeerError("a record in the job's store is malformed")
        return cls(raw[0], raw[1], tuple(raw[2]))

    def to_json(self) -> list[Any]:
        return [self.timed_out, self.text[:1000], list(self.absent)]

    def error(self, rank: int) -> FlashpointError:
        """As ``rank`` raises it, which may be one of those that were waited for."""
        if not self.timed_out:
            return PeerError(f"another rank gave up: {self.text}", rank=rank)
        if rank not in self.absent:
            return too_late(self.text, rank)
        return DeadlineExceededError(
            f"this rank came when the others had given up: {self.text}",
            rank=rank,
            setting="MLFLASHPOINT_DEADLINE_S",
            remedy="make this call equally often on all ranks, or raise the setting if this rank comes slowly; "
            "the next call is in step again",
        )


@dataclass(frozen=True)
class Absent:
    """Ranks that have not done ``what``; as text one clause that names them."""

    ranks: list[int]
    what: str

    def __str__(self) -> str:
        return f"{named(self.ranks)} did not answer ({self.what})"


def too_late(text: str, rank: int) -> DeadlineExceededError:
    return DeadlineExceededError(
        text,
        rank=rank,
        setting="MLFLASHPOINT_DEADLINE_S",
        remedy="look at the logs of the ranks named, or raise the setting if they start slowly",
    )
