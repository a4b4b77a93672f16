"""The roster: at a start every rank says who and where it is, and all learn the number and name of this incarnation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlflashpoint.core.channel import Channel, poll
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError

T = TypeVar("T")

#: part of the deadline after which rank 0 gives up; it can name who is missing, so it has to be the first
_FIRST_SHARE = 0.8


@dataclass(frozen=True)
class Member:
    """One rank of the job as it is now.

    Attributes:
        rank: global rank in the group.
        seat: local rank, which names its seat.
        node: identity of the node's memory container, empty if it has none.
        domain: label of the node's failure domain.
        seen: highest incarnation number that its node knows of.
        leader: whether it speaks for its node, one rank per node.
        problem: why it has no memory store, None if it has one.
    """

    rank: int
    seat: int
    node: str
    domain: str
    seen: int
    leader: bool = False
    problem: str | None = None

    @classmethod
    def from_json(cls, raw: Any) -> Member:
        """Raises PeerError for a malformed record."""
        kinds: dict[str, tuple[type, ...]] = {
            "rank": (int,),
            "seat": (int,),
            "node": (str,),
            "domain": (str,),
            "seen": (int,),
            "leader": (bool,),
            "problem": (str, type(None)),
        }
        if not isinstance(raw, dict) or set(raw) != set(kinds) or any(type(raw[n]) not in k for n, k in kinds.items()):
            raise PeerError(
                "a rank's entry in the roster is malformed", remedy="run one mlflashpoint release on all ranks"
            )
        return cls(**raw)


@dataclass(frozen=True)
class Joined:
    """What joining gave: this start of the job, this rank's entry, and on rank 0 the entries of all by rank."""

    start: Incarnation
    me: Member
    members: tuple[Member, ...]


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
        self._deadline = Deadline(deadline_s * (_FIRST_SHARE if rank == 0 else 1.0))

    def until(self, look: Callable[[], T | None], missing: Callable[[], str]) -> T:
        """Wait for ``look`` to find something.

        Raises:
            DeadlineExceededError: it did not in time, or some rank said so; the message is ``missing()`` of that rank.
            PeerError: another rank called the conversation off, or the store can't be reached.
        """

        def peek() -> T | _CalledOff | None:
            found = look()
            return found if found is not None else self._called_off()

        found = poll(peek, self._deadline, world_size=self.world_size)
        if found is None:
            found = self.call_off(f"{missing()} within {self._deadline.seconds:g} s", timed_out=True)
        if isinstance(found, _CalledOff):
            raise found.error(self.rank)
        return found  # type: ignore[return-value]

    def arrive(self, what: str) -> None:
        """Tell that this rank has done ``what``."""
        self.channel.post(f"{what}/{self.rank}", 1)
        self.channel.add(what)

    def all_arrived(self, what: str) -> None:
        """Wait until every rank has done ``what``; raises as ``until`` does, naming those that have not."""

        def missing() -> str:
            late = [rank for rank in range(self.world_size) if self.channel.read(f"{what}/{rank}") is None]
            shown = ", ".join(map(str, late[:16])) + (f" and {len(late) - 16} more" if len(late) > 16 else "")
            return f"rank{'s' if len(late) != 1 else ''} {shown} did not answer ({what})"

        self.until(lambda: True if self.channel.add(what, 0) >= self.world_size else None, missing)

    def call_off(self, text: str, *, timed_out: bool = False) -> _CalledOff:
        """End the conversation for all ranks; the first reason given holds."""
        raw = self.channel.decide("called_off", [timed_out, text[:1000]])
        return _CalledOff.from_json(raw)

    def _called_off(self) -> _CalledOff | None:
        raw = self.channel.read("called_off")
        return None if raw is None else _CalledOff.from_json(raw)


@dataclass(frozen=True)
class _CalledOff:
    timed_out: bool
    text: str

    @classmethod
    def from_json(cls, raw: Any) -> _CalledOff:
        if not isinstance(raw, list) or [type(item) for item in raw] != [bool, str]:
            raise PeerError("a record in the job's store is malformed")
        return cls(*raw)

    def error(self, rank: int) -> FlashpointError:
        if self.timed_out:
            return DeadlineExceededError(
                self.text,
                rank=rank,
                setting="MLFLASHPOINT_DEADLINE_S",
                remedy="look at the logs of the ranks named, or raise the setting if they start slowly",
            )
        return PeerError(f"another rank gave up: {self.text}", rank=rank)


def join(room: Room, me: Member, lineage: Lineage) -> Joined:
    """Enter the roster; collective.

    Args:
        room: a conversation that only this start uses.
        me: this rank; ``leader`` is decided here.
        lineage: what this node knows of earlier starts.

    Raises:
        DeadlineExceededError: some ranks did not come; names them.
        PeerError: the job's store can't be reached, or holds records of another release.
    """
    leader = bool(me.node) and room.channel.add(f"leader/{me.node}") == 1
    me = dataclasses.replace(me, leader=leader, seen=max(me.seen, lineage.newest))
    room.channel.post(f"member/{me.rank}", dataclasses.asdict(me))
    room.arrive("joined")
    members: tuple[Member, ...] = ()
    if me.rank == 0:
        room.all_arrived("joined")
        cards = room.channel.read_many([f"member/{rank}" for rank in range(room.world_size)])
        members = tuple(map(Member.from_json, cards))
        start = Incarnation.after(max(member.seen for member in members))
        room.channel.post("start", Lineage((start,)).to_json())
        return Joined(start, me, members)
    raw = room.until(lambda: room.channel.read("start"), lambda: "rank 0 did not answer (joined)")
    starts = Lineage.from_json(raw).starts
    if len(starts) != 1:
        raise PeerError("the record of this start is malformed")
    return Joined(starts[0], me, members)
