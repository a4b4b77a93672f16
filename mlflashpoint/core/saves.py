"""The saves of one rank in order: what a step means after the last one, and what is counted and logged of each."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from typing import Any

from mlflashpoint.core.counters import Counters, as_flashpoint, log_record
from mlflashpoint.core.loads import Loads
from mlflashpoint.core.pipeline import Pipeline
from mlflashpoint.core.results import SaveResult
from mlflashpoint.core.session import Session
from mlflashpoint.core.ticket import Attributes, Ticket
from mlflashpoint.errors import FlashpointError, SlotBusyError, StepError

log = logging.getLogger("mlflashpoint.core")


def whole_step(step: Any) -> int:
    """The step that training goes on from, a number of any whole kind; raises StepError."""
    try:
        if not isinstance(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise StepError(f"step {step!r} is not a whole number", remedy="give the step that training goes on from")


class Saves:
    """Keeps the order of steps, resumes and rollbacks.

    Args:
        session: an opened session.
        pipeline: does the work.
        counters: where to count.
        loads: what is still open for reading there is closed before a slot may be overwritten.
    """

    def __init__(self, session: Session, pipeline: Pipeline, counters: Counters, loads: Loads) -> None:
        self._session = session
        self._pipeline = pipeline
        self._counters = counters
        self._loads = loads
        self._seq = 0
        self._last: SaveResult | None = None
        #: kind and message of the last failure, and the first step in a row that it came to
        self._cause: tuple[type, str] | None = None
        self._cause_step = -1
        #: whether a save has begun in this process
        self._began = False

    def save(
        self, check: Callable[[], None], state: Any, step: int, topology: str, attributes: Attributes, wait: bool
    ) -> SaveResult:
        """One save; ``check`` raises if the runtime can't be used. Raises nothing itself."""
        started = time.perf_counter()
        staged_bytes, error = 0, None
        ticket: Ticket | None = None
        try:
            check()
            ticket = self._ticket(step, topology)
            if ticket is not None:
                staged_bytes = self._pipeline.stage(ticket, state, attributes)
                if wait:
                    self._pipeline.await_commit(ticket)
                    error = ticket.error
        except Exception as raised:
            error = as_flashpoint(raised, rank=self._session.ranks.rank, step=step)
            if ticket is not None and ticket.staged is None:
                self._pipeline.give_up(ticket, error)
            self._counters.add("saves_skipped" if isinstance(error, SlotBusyError) else "saves_failed")
            self._counters.failure("a save was skipped" if isinstance(error, SlotBusyError) else "a save failed", error)
        skipped = (ticket is None and error is None) or isinstance(error, SlotBusyError)
        result = SaveResult(error is None, step, error, time.perf_counter() - started, staged_bytes, skipped)
        if ticket is not None:
            self._last = result
        self._tell(result)
        return result

    @property
    def step(self) -> int | None:
        """Step of the last save since training went back, whatever became of it; None for no such save."""
        return None if self._last is None else self._last.step

    def failed(self, step: int, reason: BaseException) -> None:
        """There is no state to save at ``step`` on this rank; raises StepError."""
        ticket = self._ticket(step, "")
        if ticket is None:
            return
        error = as_flashpoint(reason, rank=self._session.ranks.rank, step=step)
        self._pipeline.pass_over(ticket, error)
        self._counters.add("saves_failed")
        self._last = SaveResult(False, step, error)
        self._tell(self._last)

    def resumed(self, step: int) -> None:
        """Training goes on from ``step``, -1 from nothing; once a save has begun each call is a rollback.

        A call behind which this rank has begun no save counts too: the others may have begun some, and all must count
        alike.
        """
        if not self._began:
            self._session.resumed_from[-1] = step
            self._pipeline.standing.go_on_from(step)
            self._session.remember()
        else:
            self._roll_back(step)

    def _ticket(self, step: int, topology: str) -> Ticket | None:
        """The ticket of a save that begins, None if the step is stored already."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StepError(f"step {step!r} is not a whole number from 0")
        last = self._last
        if last is not None and step == last.step:
            if last.ok:
                return None
            what = "was skipped" if last.skipped else "has failed"
            raise StepError(
                f"the save of this step {what} on this rank, which is final", remedy="save again under the next step"
            )
        if last is not None and step < last.step:
            log.warning(
                "step %d follows step %d: taken for a rollback to a step that is not known, so that no older version "
                "counts; tell it by resumed(step) on all ranks, and those up to there do",
                step,
                last.step,
            )
            self._roll_back(-1)
        elif last is None and self._session.resumed_from[-1] is None and not self._pipeline.storeless:
            self.resumed(self._loads.origin(step))
        self._loads.release()
        epoch, first = self._session.epoch, self._last is None
        self._began = True
        return Ticket(step, epoch, topology, back_at=self._session.resumed_from[-1] if first and epoch else None)

    def _roll_back(self, step: int) -> None:
        self._session.resumed_from.append(step)
        self._pipeline.roll_back(step)
        self._session.remember()
        self._last = None

    def _tell(self, result: SaveResult) -> None:
        self._seq += 1
        self._counters.add("blocking_s", result.blocking_s)
        self._counters.add("bytes_staged", result.staged_bytes)
        if result.ok:
            self._counters.raise_to("last_step", result.step)
        fields: dict[str, Any] = {
            "blocking_ms": round(result.blocking_s * 1e3, 3),
            "bytes": result.staged_bytes,
            "group": self._session.group,
            "incarnation": self._session.number(self._session.epoch),
            "ok": result.ok,
            "rank": self._session.ranks.rank,
            "seq": self._seq,
            "skipped": result.skipped,
            "step": result.step,
        }
        if result.error is not None:
            fields["error"] = self._in_short(result.error, result.step)
        log_record(logging.INFO, "save", fields)

    def _in_short(self, error: FlashpointError, step: int) -> str:
        """What the record of a save says of its error; the remedy was told once, apart from it."""
        cause = type(error), error.message
        if cause == self._cause:
            return f"as at step {self._cause_step}"
        self._cause, self._cause_step = cause, step
        return error.message
