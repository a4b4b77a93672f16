"""Draining: what a seat holds in memory goes to a durable directory, the newest complete version first."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.core.arena import SlotInfo, scan_seat
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.pipeline import Pipeline
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.session import Session
from mlflashpoint.errors import DrainError, FlashpointError

log = logging.getLogger("mlflashpoint.core")

_FLUSH_S = 2.0
#: part of the budget for writing; the rest is for taking back what was not finished, and for saying why
_WRITING = 0.9


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
        DrainError: not even one shard could be drained.
    """
    deadline = time.monotonic() + budget_s
    done: list[ShardRecord] = []
    nbytes, failure = 0, None
    for _ in range(2):
        for slot in _in_order(seat, rank, newest()):
            try:
                holding = Holding.open(slot.path)
                nbytes += target.put(holding, deadline=deadline)
                done.append(holding.record)
            except FlashpointError as error:
                failure = failure or error
                log.log(logging.DEBUG if done else logging.WARNING, "a shard was not drained: %s", error)
        if done:
            break
        # Training may have gone on, and have overwritten one slot after the other while it was being read.
    if failure is not None and not done:
        raise failure
    if done:
        target.prune()
        steps = ", ".join(str(record.step) for record in done)
        log.info("rank %d: drained %d bytes of steps %s to %s", rank, nbytes, steps, target.path)
    return Drained(tuple(record.step for record in done), nbytes)


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
