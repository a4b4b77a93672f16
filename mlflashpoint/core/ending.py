"""The end of a runtime: what is under way is finished, in bounded time, and the seat is given up."""

from __future__ import annotations

import logging

from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.depot import Depot
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.orphans import free_slots
from mlflashpoint.core.pipeline import Pipeline
from mlflashpoint.core.session import Session

log = logging.getLogger("mlflashpoint.core")

_LONGEST_S = 60.0


def end(session: Session, pipeline: Pipeline, exchange: Exchange, depot: Depot, *, discard: bool) -> None:
    """Close all parts of a runtime, in the order in which they need each other; a minute at most.

    With ``discard`` the memory of all versions that this rank keeps is freed, too.
    """
    rank = session.ranks.rank
    deadline = Deadline(min(_LONGEST_S, session.config.deadline_s))
    flushed = pipeline.flush(deadline.remaining_s) and exchange.wait_idle(deadline.remaining_s)
    if flushed and not discard and exchange.linked:
        pipeline.await_verdicts(deadline.remaining_s, lambda: exchange.receiving)
    exchange.report()
    exchange.close(max(1.0, deadline.remaining_s))
    idle = pipeline.close(deadline.remaining_s)
    if not (idle and flushed):
        log.warning("rank %d: the last save was still under way at the end and may not count", rank)
    depot.close()
    if discard and idle and session.problem is None:
        freed = free_slots(session.seat)
        log.info("rank %d: training has ended well, %d bytes of memory versions are freed", rank, freed)
    session.close()
