"""What the ranks say to each other in a script's call: rank 0 decides, once all are in the call and none has trouble.

A round ends the same way for all: with rank 0's decision, one rank's trouble, or that somebody did not come in time. So
all ranks do the same, and nobody waits for ranks that have gone on. See ``core.meeting``.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mlflashpoint.core.meeting import Meeting
from mlflashpoint.core.ranks import Ranks, ranks_from
from mlflashpoint.core.round import Question
from mlflashpoint.errors import FlashpointError, PeerError, RankUnknownError
from mlflashpoint.settings import BY_NAME

log = logging.getLogger("mlflashpoint.adapter")

#: rounds without all ranks, one after the other, after which we leave a script alone
_PATIENCE = 2
#: part of the deadline in which a round ends by itself and can say why; at its end a call that hangs is left behind
_SHARE = 0.9
_MAX_TEXT = 2000
#: no group's: those begin with ``mlflashpoint/``
_PREFIX = "mlflashpoint-script"

_meeting = Meeting(_PREFIX)
_late = 0


@dataclass(frozen=True)
class Outcome:
    """How a round ended, the same on every rank.

    Attributes:
        answer: rank 0's decision; None if there is none.
        rank: the rank that has trouble, -1 if some rank did not come, None if all is well.
        trouble: what kind of trouble, in the words of the rank that has it.
    """

    answer: Any = None
    rank: int | None = None
    trouble: str = ""

    @property
    def ok(self) -> bool:
        return self.rank is None


def hold(answer: Callable[[], Any] = lambda: None, *, trouble: str = "", seconds: float | None = None) -> Outcome:
    """One round; collective, bounded, raises nothing.

    Args:
        answer: rank 0's decision, plain data; called there alone, when all ranks have come without trouble.
        trouble: why this rank can't go on.
        seconds: to wait for the others, None for the setting ``deadline_s``.
    """
    global _late
    if not _several():
        return Outcome(rank=0, trouble=trouble) if trouble else _decision(answer)
    rank = dist.get_rank()

    def decided(_: bool) -> list[Any]:
        found = _decision(answer)
        return [found.rank, found.trouble, found.answer]

    try:
        limit = float(BY_NAME["deadline_s"].read(os.environ)) if seconds is None else seconds
        question = Question(
            "round",
            yes=decided,
            no=lambda error: [-1, f"rank {rank}: {error.message}"[:_MAX_TEXT], None],
            objection=[rank, trouble[:_MAX_TEXT], None] if trouble else None,
            decides=rank == 0,
        )
        raw = _meeting.ask(
            dist.distributed_c10d._get_default_store(),
            question,
            rank=rank,
            size=dist.get_world_size(),
            deadline_s=limit * _SHARE,
            limit_s=limit,
        ).outcome
        if not isinstance(raw, list) or len(raw) != 3:
            raise PeerError("a decision in the job's store is malformed")
        outcome = Outcome(raw[2], raw[0], str(raw[1]))
    except FlashpointError as error:
        outcome = Outcome(rank=-1, trouble=f"rank {rank}: {error}")
    _late = _late + 1 if outcome.rank == -1 else 0
    if _late == 1:
        log.error("a call is left to the script alone: %s", outcome.trouble)
    elif _late == _PATIENCE:
        log.error("the ranks do not come together (%s): dcp is left to the script from now on", outcome.trouble)
    return outcome


def agreed(ok: bool, seconds: float | None = None) -> bool:
    """Whether every rank says ``ok``; collective, bounded."""
    return hold(trouble="" if ok else "it said no", seconds=seconds).ok


def given_up() -> bool:
    """Whether the ranks have missed each other so often that we stay out of the script's calls; on all ranks."""
    return _late >= _PATIENCE


def ranks() -> Ranks:
    """Who this process is; collective. Without LOCAL_RANK (mp.spawn) it is counted among the ranks of the same host.

    Raises:
        RankUnknownError: it could not be found out; names what to set.
        PeerError: the ranks did not come together.
    """
    try:
        known: Ranks | None = ranks_from(os.environ)
    except RankUnknownError:
        known = None
    outcome = hold(trouble="" if known is not None else "it has no local rank")
    if outcome.ok and known is not None:
        return known
    rank, size = dist.get_rank(), dist.get_world_size()
    if _meeting.channel is None:
        raise PeerError(f"the ranks did not come together: {outcome.trouble}", rank=rank)
    channel, host = _meeting.channel.under("hosts"), socket.gethostname()
    channel.post(str(rank), host)
    hosts = channel.read_many([str(other) for other in range(size)]) if agreed(True) else []
    if len(hosts) != size:
        raise RankUnknownError(
            "the local rank is unknown", setting="LOCAL_RANK", rank=rank, remedy="set it on every rank"
        )
    return Ranks(rank, size, hosts[:rank].count(host))


def _decision(answer: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(answer())
    except Exception as error:
        log.error("rank 0 can't decide: %s", error, exc_info=not isinstance(error, FlashpointError))
        return Outcome(rank=0, trouble=f"{type(error).__name__}: {error}"[:_MAX_TEXT])


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
