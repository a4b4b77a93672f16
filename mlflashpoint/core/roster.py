"""The roster: at a start every rank says who and where it is, and all learn the number and name of this incarnation.

The store may outlive a start: torchrun can keep one for all restarts, with the keys of ranks that are long dead in it.
So no key is trusted for being there. Each process has a random name of its own (its token), rank 0 proposes a roster
of the tokens that it found, and a rank takes part in a proposal only if its own token is in it. When a living rank
has replaced a dead one's entry, rank 0 proposes anew; a proposal that every rank has acknowledged is confirmed.
Everything later is said under the name of the confirmed start, which no other start ever has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from dataclasses import dataclass
from typing import Any

from mlflashpoint.core.channel import Channel, poll
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.member import PROTOCOL, Member
from mlflashpoint.core.placement import Placement, place
from mlflashpoint.core.room import FIRST_SHARE, Absent, CalledOff, too_late
from mlflashpoint.errors import PeerError

__all__ = ["PROTOCOL", "Joined", "Member", "join", "meet"]

_ALONE = Placement()


@dataclass(frozen=True)
class Joined:
    """What joining gave.

    Attributes:
        start: this start of the job.
        me: this rank's entry.
        members: on rank 0 the entries of all by rank, elsewhere empty.
        placement: this rank's part in the replication.
        proposal: name of the roster that all have acknowledged.
    """

    start: Incarnation
    me: Member
    members: tuple[Member, ...]
    placement: Placement = _ALONE
    proposal: str = ""


def join(
    channel: Channel,
    me: Member,
    lineage: Lineage,
    *,
    world_size: int,
    deadline_s: float,
    replicas: int = 0,
    about: str = "",
) -> Joined:
    """Enter the roster; collective.

    Args:
        channel: talk under a prefix that is the group's; it may hold what earlier starts said.
        me: this rank; ``leader`` is decided here.
        lineage: what this node knows of earlier starts.
        world_size: ranks that have to come.
        deadline_s: longest wait in seconds.
        replicas: copies of each shard on other failure domains; only rank 0's is used.
        about: what they come for; a call that rank 0 gives up is given up by those alone who came for the same.

    Raises:
        DeadlineExceededError: some ranks did not come; names them.
        PeerError: the job's store can't be reached, or holds records of another release.
    """
    token = secrets.token_hex(8)
    me = dataclasses.replace(me, seen=max(me.seen, lineage.newest))
    channel.post(f"hello/{me.rank}", [token, dataclasses.asdict(me)])
    channel.add("hellos")
    if me.rank == 0:
        return _Host(channel, me, world_size, Deadline(deadline_s * FIRST_SHARE), replicas, about).gather()
    return _follow(channel, me, token, world_size, Deadline(deadline_s), about)


def meet(channel: Channel, *, rank: int, world_size: int, deadline_s: float, about: str = "") -> str:
    """A name for what these processes say to each other from now on, which no process before them can know.

    Collective; raises as ``join`` does, and takes its ``about``. What is said under the name is safe from what the
    store holds already.
    """
    me = Member(rank=rank, seat=0, node="", domain="", seen=0, job_id="")
    joined = join(channel, me, Lineage(), world_size=world_size, deadline_s=deadline_s, about=about)
    # The ranks have met: what is only tidied up may fail.
    with contextlib.suppress(PeerError):
        talk = channel.under(f"proposal-{joined.proposal}")
        if talk.add("met") == world_size:
            _forget(talk, world_size)
    return joined.start.run


def _follow(channel: Channel, me: Member, token: str, world_size: int, deadline: Deadline, about: str) -> Joined:
    """Every other rank's part: acknowledge each proposal that names this process, until one is confirmed."""
    #: proposal -> whether this rank leads its node by it
    acknowledged: dict[str, bool] = {}
    foreign: set[str] = set()

    def look() -> Joined | None:
        name = channel.read("proposal")
        if name is None or name in foreign:
            return None
        talk = channel.under(f"proposal-{name}")
        if name not in acknowledged:
            entry = talk.read(f"rank/{me.rank}")
            if entry is None or entry[0] != token:
                foreign.add(name)
                return None
            called_off = talk.read("called_off")
            if called_off is not None and talk.read("about") != about:
                foreign.add(name)
                return None
            if called_off is not None:
                raise CalledOff.from_json(called_off).error(me.rank)
            acknowledged[name] = bool(entry[1])
            talk.post(f"ack/{me.rank}", 1)
            talk.add("acks")
        start = talk.read("confirmed")
        if start is None:
            return None
        leader = acknowledged[name]
        placement = Placement.from_json(talk.read(f"placement/{me.rank}"))
        return Joined(_start_from(start), dataclasses.replace(me, leader=leader), (), placement, name)

    joined = poll(look, deadline, world_size=world_size)
    if joined is None:
        raise too_late(f"{Absent([0], 'joined')} within {deadline.seconds:g} s", me.rank)
    return joined


def _forget(talk: Channel, world_size: int) -> None:
    """Delete a proposal that nobody reads any more."""
    each = [f"{what}/{rank}" for what in ("rank", "ack", "placement") for rank in range(world_size)]
    talk.delete_later(*each, "acks", "about", "called_off", "confirmed", "met")


class _Host:
    """Rank 0's part: propose a roster until one is acknowledged by all."""

    def __init__(
        self, channel: Channel, me: Member, world_size: int, deadline: Deadline, replicas: int, about: str
    ) -> None:
        self._channel = channel
        self._about = about
        self._replicas = replicas
        self._me = me
        self._world_size = world_size
        self._deadline = deadline
        self._tokens: list[str | None] = [None] * world_size
        self._members: list[Member | None] = [None] * world_size
        self._read_at = 0
        self._talk, self._name = channel, ""
        self._proposed = False
        self._superseded: list[Channel] = []

    def gather(self) -> Joined:
        try:
            done = poll(self._complete, self._deadline, world_size=self._world_size)
            reason = self._misfit() if done else self._missing()
        except PeerError as error:
            reason = CalledOff(False, error.message)
        if reason is not None:
            # Those who are here must not wait for those who are not.
            self._propose(called_off=reason)
            raise reason.error(self._me.rank)
        members = tuple(member for member in self._members if member is not None)
        start = Incarnation.after(max(member.seen for member in members))
        placements = place(members, self._replicas)
        self._talk.post_many({f"placement/{rank}": part.to_json() for rank, part in placements.items()})
        self._talk.post("confirmed", Lineage((start,)).to_json())
        for talk in self._superseded:
            _forget(talk, self._world_size)
        return Joined(start, members[0], members, placements[0], self._name)

    def _complete(self) -> bool | None:
        if self._reread() and None not in self._tokens:
            self._propose()
        # Rank 0 itself has nothing to acknowledge.
        return True if self._proposed and self._talk.add("acks", 0) >= self._world_size - 1 else None

    def _reread(self, *, always: bool = False) -> bool:
        """Read the entries again if there can be news; whether there were."""
        count = self._channel.add("hellos", 0)
        missing = self._tokens.count(None)
        # Reading all entries is dear when there are many ranks: not before all those that are missing can have come.
        if not always and (count == self._read_at or (self._read_at and count - self._read_at < missing)):
            return False
        self._read_at = count
        news = False
        for rank, raw in enumerate(self._channel.read_present([f"hello/{r}" for r in range(self._world_size)])):
            # An entry that is proposed already stays as it was proposed.
            if raw is not None and (hello := _hello_from(raw))[0] != self._tokens[rank]:
                self._tokens[rank], self._members[rank] = hello
                news = True
        return news

    def _propose(self, called_off: CalledOff | None = None) -> None:
        if self._proposed:
            self._superseded.append(self._talk)
        name = self._name = secrets.token_hex(8)
        talk = self._talk = self._channel.under(f"proposal-{name}")
        speakers: set[str] = set()
        for rank, member in enumerate(self._members):
            if member is not None:
                leads = bool(member.node) and member.node not in speakers
                speakers.add(member.node)
                self._members[rank] = dataclasses.replace(member, leader=leads)
        entries = zip(self._tokens, self._members, strict=True)
        talk.post_many({f"rank/{r}": [t, m.leader] for r, (t, m) in enumerate(entries) if m is not None})
        if called_off is not None:
            talk.post_many({"called_off": called_off.to_json(), "about": self._about})
        self._channel.post("proposal", name)
        self._proposed = True

    def _missing(self) -> CalledOff:
        self._reread(always=True)
        late = [rank for rank, token in enumerate(self._tokens) if token is None]
        # All have an entry, so one of the entries is a dead rank's: it has not acknowledged the proposal.
        late = late or [r for r in range(1, self._world_size) if self._talk.read(f"ack/{r}") is None]
        return CalledOff(True, f"{Absent(late, 'joined')} within {self._deadline.seconds:g} s", tuple(late))

    def _misfit(self) -> CalledOff | None:
        for member in self._members:
            if member is not None and (member.job_id, member.protocol) != (self._me.job_id, self._me.protocol):
                theirs = f"rank {member.rank} is of job {member.job_id!r}, protocol {member.protocol}"
                return CalledOff(False, f"{theirs}; rank 0 of job {self._me.job_id!r}, protocol {self._me.protocol}")
        return None


def _hello_from(raw: Any) -> tuple[str, Member]:
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str):
        raise PeerError("a rank's entry in the roster is malformed", remedy="run one mlflashpoint release on all ranks")
    return raw[0], Member.from_json(raw[1])


def _start_from(raw: Any) -> Incarnation:
    starts = Lineage.from_json(raw).starts
    if len(starts) != 1:
        raise PeerError("the record of this start is malformed")
    return starts[0]
