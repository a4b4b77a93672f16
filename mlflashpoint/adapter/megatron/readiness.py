"""Whether all ranks can go on to the next collective; if one can't, an error on each that says which and why.

Asked of the ranks of torch.distributed, through the job's store: a rank that has no memory store, or can't tell which,
answers too. So no rank waits in a collective, which knows no deadline of ours, for one that has failed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mlflashpoint import errors
from mlflashpoint.core.channel import Channel, Store, poll
from mlflashpoint.core.checkpoint_saver import Stores
from mlflashpoint.core.connection import drop
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.core.node_versions import split_version
from mlflashpoint.core.roster import meet
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError, StepError
from mlflashpoint.settings import BY_NAME

#: no group's: those begin with ``mlflashpoint/``
_PREFIX = "mlflashpoint-megatron"
#: the inner deadline tells who is missing; the outer one only guards against a call that never comes back
_SLACK_S = 10.0
_MAX_TEXT = 2000
_FIELDS = ("remedy", "setting", "rank", "step", "path")


@dataclass
class _Meeting:
    """Where the ranks of one process group talk.

    Attributes:
        channel: under a name that nobody else has.
        rank: this one.
        size: number of ranks.
        store: the group's.
        pid: a forked child is none of the ranks.
        rounds: how often each question was asked; all ranks ask the same in the same order.
    """

    channel: Channel
    rank: int
    size: int
    store: weakref.ref[Store]
    pid: int
    rounds: Counter[str] = field(default_factory=Counter)


_meeting: _Meeting | None = None


def all_ready(
    what: str, problem: BaseException | None = None, *, deadline_s: float, vote: bool = True, version: object = ""
) -> bool:
    """Go on only if no rank has a problem; collective, within the deadline.

    Args:
        what: names the question.
        problem: why this rank can't go on.
        deadline_s: longest wait for the other ranks.
        vote: what else this rank is asked.
        version: what the question is about; empty for nothing that the ranks could differ in.

    Returns:
        whether every rank votes so.

    Raises:
        the problem itself on the rank that has it; on the others an error of the same kind, if it is one of ours, else
        PeerError with its text.
        StepError: the ranks are at different versions.
        DeadlineExceededError: some ranks did not come. Raised on those too, once they do.
    """
    global _meeting
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if problem is not None:
            raise problem
        return vote
    if isinstance(problem, FlashpointError) and problem.rank is None:
        problem.rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()

    def talk() -> tuple[_Meeting, dict[str, Any]]:
        deadline = Deadline(deadline_s)
        meeting = _met(store, deadline)
        return meeting, _round(meeting, what, problem, vote, str(version), deadline)

    try:
        _meeting, outcome = bounded(talk, deadline_s + _SLACK_S, f"asking all ranks whether they can go on ({what})")
    except FlashpointError as error:
        _meeting = None
        if isinstance(error, DeadlineExceededError):
            drop(store)
        raise problem or error from None
    if outcome["kind"] == DeadlineExceededError.__name__ and outcome["rank"] is None:
        # Whoever did not come has counted one question less.
        _meeting = None
    if problem is not None:
        raise problem
    if outcome["kind"] is not None:
        raise _error_of(outcome)
    return bool(outcome["vote"])


def deadline_of(stores: Stores, version: object) -> float:
    """The deadline of the store that ``version`` lies in; the setting's if that is not open."""
    with contextlib.suppress(FlashpointError):
        opened = stores.opened(split_version(str(version), stores.group)[0])
        if opened is not None:
            return opened.config.deadline_s
    return float(BY_NAME["deadline_s"].read(os.environ))


def _met(store: Store, deadline: Deadline) -> _Meeting:
    """The meeting of this process group, called at the first question; raises as ``roster.meet`` does."""
    if _meeting is not None and _meeting.store() is store and _meeting.pid == os.getpid():
        return _meeting
    channel = Channel(store, _PREFIX)
    rank, size = dist.get_rank(), dist.get_world_size()
    name = meet(channel.under("start"), rank=rank, world_size=size, deadline_s=deadline.remaining_s)
    return _Meeting(channel.under(f"run-{name}"), rank, size, weakref.ref(store), os.getpid())


def _round(
    meeting: _Meeting, what: str, problem: BaseException | None, vote: bool, version: str, deadline: Deadline
) -> dict[str, Any]:
    """One question: whoever settles it first settles it for all. Raises PeerError."""
    meeting.rounds[what] += 1
    channel, rank, size = meeting.channel.under(f"{what}/{meeting.rounds[what]}"), meeting.rank, meeting.size
    if problem is None and version:
        other, named = channel.decide("version", [rank, version])
        if named != version:
            problem = StepError(
                f"the ranks are at different versions (rank {other}: {named}, rank {rank}: {version})",
                rank=rank,
                remedy="nothing was done; pass the same checkpoint id on all ranks",
            )
    if problem is not None:
        outcome = channel.decide("outcome", _record(problem, rank))
    else:
        if not vote:
            # Before this rank is counted: who is counted last must know all votes.
            channel.add("noes")
        if channel.add("came") == size:
            outcome = channel.decide("outcome", {"kind": None, "vote": channel.add("noes", 0) == 0})
        else:
            outcome = poll(lambda: channel.read("outcome"), deadline, world_size=size)
    if outcome is None:
        missing = size - channel.add("came", 0)
        late = DeadlineExceededError(
            f"{missing} of {size} ranks did not come within {deadline.seconds:g} s ({what})",
            setting="MLFLASHPOINT_DEADLINE_S",
            remedy="look for a rank that is stuck, or has failed where the others have not",
        )
        outcome = channel.decide("outcome", _record(late, rank))
    if channel.add("read") == size:
        channel.delete("version", "outcome", "noes", "came", "read")
    if not isinstance(outcome, dict) or "kind" not in outcome:
        raise PeerError("an answer in the job's store is malformed")
    return outcome


def _record(problem: BaseException, rank: int) -> dict[str, Any]:
    """The problem as plain data; of an error that is none of ours the text alone."""
    if isinstance(problem, FlashpointError) and type(problem).__init__ is FlashpointError.__init__:
        known = {name: getattr(problem, name) for name in _FIELDS}
        return {**known, "kind": type(problem).__name__, "message": problem.message[:_MAX_TEXT]}
    return {"kind": PeerError.__name__, "message": f"{type(problem).__name__}: {problem}"[:_MAX_TEXT], "rank": rank}


def _error_of(record: dict[str, Any]) -> FlashpointError:
    kind = getattr(errors, str(record["kind"]), PeerError)
    if not (isinstance(kind, type) and issubclass(kind, FlashpointError)):
        kind = PeerError
    return kind(str(record.get("message")), **{name: record.get(name) for name in _FIELDS})
