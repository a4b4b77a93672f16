"""Draining: what a seat holds in memory goes to a durable directory, the newest complete version first."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlflashpoint.core.arena import SlotInfo, scan_seat
from mlflashpoint.core.draindir import DrainDir, overwritten
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.pipeline import Pipeline
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.session import Session
from mlflashpoint.core.slotfiles import still_holds
from mlflashpoint.errors import DrainError, FlashpointError, OverwrittenError

log = logging.getLogger("mlflashpoint.core")

_FLUSH_S = 2.0
#: part of the budget for writing; the rest is for taking back what was not finished, and for saying why
_WRITING = 0.9
#: looks at what is there now, when the job has overwritten what was being copied
_TRIES = 3

_T = TypeVar("_T")


@dataclass(frozen=True)
class Drained:
    """What a drain has written: ``steps`` of the shards that are safe now, and ``nbytes`` written for them."""

    steps: tuple[int, ...]
    nbytes: int


def drain_rank(session: Session, pipeline: Pipeline) -> Drained:
    """Drain what a running rank has to where its settings say; blocks no longer than they say.

    Raises:
        DrainError: there is no directory, or not even one shard could be drained.
    """
    target, config = session.drain, session.config
    if target is None:
        raise DrainError(
            "there is nowhere to drain to", setting="MLFLASHPOINT_DRAIN_DIR", remedy="set it to a durable directory"
        )
    began = time.monotonic()
    newest = pipeline.standing.newest_complete
    try:
        target.check(session.container.path)
        # What is being committed at this moment may become the newest complete version within the next one.
        pipeline.flush(min(_FLUSH_S, config.drain_budget_s / 4))
        left = config.drain_budget_s * _WRITING - (time.monotonic() - began)
        return drain_seat(session.seat, session.ranks.rank, target, newest=newest, budget_s=left)
    except DrainError as error:
        error.setting = error.setting or "MLFLASHPOINT_DRAIN_DIR"
        raise


def drain_of_given_up(session: Session) -> Callable[[], Drained] | None:
    """What drains the seat that ``session`` still has, once another process of this rank has taken it.

    Returns:
        None if there is no directory or no seat. What it raises is as for ``drain_seat``.
    """
    target, config = session.drain, session.config
    if target is None or session.problem is not None:
        return None
    # Only the other process knows what is complete.
    return functools.partial(
        drain_seat,
        session.seat,
        session.ranks.rank,
        target,
        newest=lambda: None,
        budget_s=config.drain_budget_s * _WRITING,
    )


def drain_seat(
    seat: Path, rank: int, target: DrainDir, *, newest: Callable[[], Version | None], budget_s: float
) -> Drained:
    """Drain one rank's own shards: of the newest complete version, then of the others that lie on its seat.

    Two ranks may not agree at that moment on which version is the newest complete one. So each goes on with the others
    that it has, newest first, as long as there is time.

    Args:
        seat: the rank's folder.
        rank: whose shards.
        target: where to.
        newest: the newest version that is known to be complete.
        budget_s: longest time in seconds.

    Raises:
        OverwrittenError: the job overwrites its versions faster than they can be copied.
        DrainError: not even one shard could be drained.
    """
    deadline = time.monotonic() + budget_s
    done: list[ShardRecord] = []
    nbytes = 0

    def copy_all() -> None:
        nonlocal nbytes
        failure: FlashpointError | None = None
        for slot in _in_order(seat, rank, newest()):
            assert slot.record is not None
            try:
                nbytes += drain_slot(slot, target, deadline=deadline)
                done.append(slot.record)
            except FlashpointError as error:
                failure = worse(failure, error)
                log.log(logging.DEBUG if done else logging.WARNING, "a shard was not drained: %s", error)
        if failure is not None and not done:
            raise failure

    tried_again(copy_all, deadline=deadline)
    if done:
        target.prune()
        steps = ", ".join(str(record.step) for record in done)
        log.info("rank %d: drained %d bytes of steps %s to %s", rank, nbytes, steps, target.path)
    return Drained(tuple(record.step for record in done), nbytes)


def drain_slot(slot: SlotInfo, target: DrainDir, *, deadline: float) -> int:
    """Drain what a slot held when it was looked at; returns the bytes written.

    Raises:
        OverwrittenError: it holds something else by now.
        FlashpointError: it can't be read, or not be drained.
    """
    assert slot.record is not None
    try:
        holding = Holding.open(slot.path)
    except FlashpointError as error:
        if still_holds(slot.path, slot.record):
            raise
        raise overwritten(slot.record, slot.path) from error
    if holding.record != slot.record:
        raise overwritten(slot.record, slot.path)
    return target.put(holding, deadline=deadline)


def worse(one: FlashpointError | None, other: FlashpointError) -> FlashpointError:
    """Of two failures the one to go by: that a slot was overwritten, which can be mended, else the first."""
    return other if one is None or (isinstance(other, OverwrittenError) and type(one) is not type(other)) else one


def tried_again(copy: Callable[[], _T], *, deadline: float) -> _T:
    """What ``copy`` returns, which looks anew at what is there each time that the job has overwritten what it copied.

    Raises:
        OverwrittenError: the job does so each time, or the deadline is over.
        FlashpointError: whatever else ``copy`` raises.
    """
    tries = 0
    while True:
        try:
            return copy()
        except OverwrittenError as error:
            tries += 1
            if tries == _TRIES or time.monotonic() > deadline:
                raise OverwrittenError(
                    "the job overwrites its versions faster than they can be copied",
                    setting="MLFLASHPOINT_KEEP_VERSIONS",
                    rank=error.rank,
                    step=error.step,
                    remedy="set it to 3, save more rarely, or set MLFLASHPOINT_DRAIN_DIR and end the job by SIGTERM",
                ) from error
            log.warning("%s; the newest version is taken instead", error)


def _in_order(seat: Path, rank: int, newest: Version | None) -> Sequence[SlotInfo]:
    def version(slot: SlotInfo) -> Version:
        assert slot.record is not None
        return Version(slot.record.incarnation, slot.record.step)

    own: dict[Version, SlotInfo] = {}
    for slot in scan_seat(seat):
        if slot.record is not None and slot.problem is None and slot.record.rank == rank:
            own.setdefault(version(slot), slot)
    # An incomplete version of before is of no use to anybody once there is a complete one.
    return sorted(own.values(), key=lambda slot: (version(slot) == newest, version(slot)), reverse=True)
