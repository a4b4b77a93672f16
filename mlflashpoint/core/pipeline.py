"""The pipeline of a save: take a slot and stage on the training thread, commit and announce in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlflashpoint.core.arena import Slot
from mlflashpoint.core.counters import Counters, as_flashpoint, log_record
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.saver import ShardSaver
from mlflashpoint.core.session import Session
from mlflashpoint.core.settlement import Settlement
from mlflashpoint.core.slots import Slots
from mlflashpoint.core.slotwait import SlotWait
from mlflashpoint.core.standing import Standing
from mlflashpoint.core.ticket import Attributes, Replication, Ticket
from mlflashpoint.core.worker import Worker
from mlflashpoint.errors import DeadlineExceededError, FlashpointError

log = logging.getLogger("mlflashpoint.core")

#: how long a rank that ends waits for the others while none of them sends anything
_QUIET_S = 5.0
#: shortest time between two glances at the training thread while something else is waited for
_GLANCE_S = 0.005
#: beyond the deadline that the late attributes have themselves
_SLACK_S = 5.0


class Pipeline:
    """Saves of one rank, one after the other. Its methods are for the training thread.

    Args:
        session: an opened session.
        counters: where to count.
        exchange: sends replicas to other nodes; None if there are none.

    Attributes:
        standing: which versions count.
    """

    def __init__(self, session: Session, counters: Counters, exchange: Exchange | None = None) -> None:
        self._session = session
        self._counters = counters
        self._exchange = exchange
        self._saver = ShardSaver()
        self._pool = SlotPool()
        self.standing = Standing(session, self._pool)
        self._settlement = Settlement(
            session,
            counters,
            self._pool,
            free=lambda: not self._slots.allocated or self._pool.available(),
            joined=exchange.open if exchange else lambda: None,
        )
        self._worker = Worker(f"mlflashpoint-{session.group}", self._watch)
        self._slots = Slots(session, self._pool, self.standing, self._worker, exchange)
        self._wait = SlotWait(session.config, self._pool, self._settlement, self._worker, exchange)
        #: step -> its save, while that is not over on this rank
        self._under_way: dict[int, Ticket] = {}

    def stage(self, ticket: Ticket, state: Any, attributes: Attributes) -> int:
        """Copy the state into a slot and hand it to the background; the blocking part of a save.

        Returns:
            the bytes staged.

        Raises:
            SlotBusyError: some rank still needs all its slots, or has no memory store; all skip the save.
            StepError: the other ranks have gone back, and this one has not.
            FlashpointError: the state can't be stored; nothing is half written.
        """
        try:
            self._settlement.require_in_step(ticket)
            seat, planned = self._session.seat, self._saver.plan(state)
            self._wait.check()
            arena = self._slots.prepare(seat, planned.nbytes)
            ticket.index = self._wait.take(ticket)
        finally:
            # Whatever becomes of this save, the ranks decide on the next one anew.
            ticket.opening = self._settlement.gate.next(ticket.epoch, ticket.step)
        try:
            if self._exchange is not None:
                # Another node may be reading what an earlier start left there.
                self._exchange.withdraw(arena.slots[ticket.index].path)
            if callable(attributes):
                ticket.late_attributes, attributes = attributes, {}
            staged = ticket.staged = self._saver.stage(arena.slots[ticket.index], planned, attributes=attributes)
            self._under_way = {step: other for step, other in self._under_way.items() if not other.done.is_set()}
            self._under_way[ticket.step] = ticket
            if not self._worker.submit(lambda: self._finish(ticket)):
                raise DeadlineExceededError(
                    "the background thread is far behind", remedy="look at its last error in the log"
                )
        except BaseException:
            ticket.staged = None
            ticket.done.set()
            self._pool.freed(ticket.index)
            raise
        return staged.nbytes

    @property
    def storeless(self) -> str:
        """Why no save of this start can succeed, in words; empty if it can, and before this rank knows."""
        return self._settlement.storeless

    def roll_back(self, step: int) -> None:
        """Training goes back to ``step`` within this process, which begins a new epoch."""
        given_up = [version for version in self._pool.open_versions() if version.step > step]
        self.standing.roll_back(step)
        # Saves of the old one may still be under way here.
        epoch = self._session.epoch
        self._settlement.gate.next(epoch, -1)
        if not self._worker.submit(lambda: self._settlement.go_back(epoch, step, given_up)):
            log.debug("the queue is full: the others are not told that training went back")

    def await_commit(self, ticket: Ticket) -> None:
        """Wait until this rank's part in the save is over; raises DeadlineExceededError after ``deadline_s``."""
        if not ticket.done.wait(self._session.config.deadline_s):
            raise DeadlineExceededError(
                f"the commit of the save took longer than {self._session.config.deadline_s:g} s",
                setting="MLFLASHPOINT_DEADLINE_S",
                remedy="look whether a rank is stuck, or raise the setting",
            )

    def pass_over(self, ticket: Ticket, error: FlashpointError) -> None:
        """Take no part in the save, which counts as begun on this rank and has failed."""
        ticket.opening = self._settlement.gate.next(ticket.epoch, ticket.step)
        ticket.done.set()
        self.give_up(ticket, error)

    def give_up(self, ticket: Ticket, error: FlashpointError) -> None:
        """Tell the others, in the background, that this rank has no shard of that step."""
        ticket.error = error
        if not self._worker.submit(lambda: self._settlement.fail(ticket, error)):
            log.debug("the queue is full: the others are not told that step %d failed", ticket.step)

    def flush(self, timeout_s: float) -> bool:
        """Wait for the background and for all replicas; False if they are not done after ``timeout_s`` seconds."""
        deadline = Deadline(timeout_s)
        return self._worker.drain(timeout_s) and self._settlement.await_told(deadline.remaining_s)

    def await_settled(self, step: int, timeout_s: float) -> bool | None:
        """Wait until all ranks are told what became of this process's save of ``step``.

        Returns:
            whether it is complete; None if no slot here tells, because nothing was saved or it is superseded.

        Raises:
            DeadlineExceededError: they are not after ``timeout_s`` seconds.
        """
        deadline, ticket = Deadline(timeout_s), self._under_way.get(step)
        if ticket is not None and ticket.done.wait(deadline.remaining_s) and ticket.error is not None:
            return False
        while ticket is None or ticket.done.is_set():
            verdict, is_open = self._pool.verdict(step, since=self._session.number(0))
            if not is_open:
                return verdict
            if deadline.passed:
                break
            self._worker.wake()
            time.sleep(min(deadline.remaining_s, 0.005 + self._session.ranks.world_size / 5_000))
        raise DeadlineExceededError(
            f"the save is not finished on all ranks after {timeout_s:g} s",
            rank=self._session.ranks.rank,
            step=step,
            setting="MLFLASHPOINT_DEADLINE_S",
            remedy="look whether a rank is stuck, or load an older version",
        )

    def await_verdicts(self, timeout_s: float, others_are_busy: Callable[[], bool]) -> None:
        """Give the other ranks time to finish the saves that this one has finished: they need its memory to do so.

        Waits until the verdicts are known; ``timeout_s`` seconds at most, and much less if nobody sends anything.
        """
        deadline, quiet = Deadline(timeout_s), Deadline(min(timeout_s, _QUIET_S))
        while self._pool.open_versions() and not deadline.passed and self._worker.started:
            if others_are_busy():
                quiet = Deadline(_QUIET_S)
            elif quiet.passed:
                break
            self._worker.wake()
            # Many ranks end at once, and ask one store.
            time.sleep(0.02 + self._session.ranks.world_size / 5_000)

    def close(self, timeout_s: float) -> bool:
        """End the background thread; False if it is still busy, then the slots stay mapped under it."""
        flushed = self.flush(timeout_s)
        stopped = self._worker.stop(timeout_s if flushed else 0.0) and flushed
        if stopped:
            self._slots.close()
        return stopped

    def _finish(self, ticket: Ticket) -> None:
        """Commit what was staged, and announce it; in the background."""
        staged, began, committed = ticket.staged, time.perf_counter(), False
        assert staged is not None
        ranks = self._session.ranks
        self._counters.add("bytes_outstanding", staged.nbytes)
        try:
            start = self._settlement.start(ticket.epoch)
            self._settlement.attempt(ticket)
            self._say_ready(ticket)
            if ticket.late_attributes is not None:
                staged = self._saver.attach(staged, self._late(ticket.late_attributes))
            record = self._saver.commit(
                staged,
                job_id=self._session.config.job_id,
                group=self._session.group,
                incarnation=start.number,
                run=start.run,
                resumed_from=-1 if start.resumed_from is None else start.resumed_from,
                step=ticket.step,
                rank=ranks.rank,
                world_size=ranks.world_size,
                topology=ticket.topology,
                between=self._settlement.glance,
            )
            committed = True
            sends = self._exchange is not None and self._exchange.sends
            self._pool.stored(ticket.index, Version(start.number, ticket.step), epoch=ticket.epoch, sending=sends)
            self._counters.add("saves_ok")
            self._counters.raise_to("last_committed_step", ticket.step)
            fields: dict[str, Any] = {"group": self._session.group, "incarnation": start.number, "rank": ranks.rank}
            fields |= {"step": ticket.step, "bytes": record.data_bytes}
            log_record(logging.DEBUG, "commit", {**fields, "commit_ms": round((time.perf_counter() - began) * 1e3, 3)})
            self._settlement.commit(ticket, self._replicate(ticket, staged.slot, record) if sends else None)
            self._slots.sweep()
        except Exception as error:
            named = as_flashpoint(error, rank=ranks.rank, step=ticket.step)
            self._counters.failure("a save failed in the background", named)
            if not committed:
                ticket.error = named
                self._counters.add("saves_failed")
                self._slots.give_up(ticket.index)
                self._settlement.fail(ticket, named)
        finally:
            self._counters.add("bytes_outstanding", -staged.nbytes)
            # It holds the state's scalars and, through the slot, the mapping.
            ticket.staged = None
            ticket.done.set()

    def _replicate(self, ticket: Ticket, slot: Slot, record: ShardRecord) -> Replication:
        """Send the slot's shard to its holders; the slot is busy until that is over."""
        assert self._exchange is not None
        replication = Replication()

        def over(error: FlashpointError | None) -> None:
            self._pool.sent(ticket.index)
            if error is not None:
                replication.error = as_flashpoint(error, rank=self._session.ranks.rank, step=ticket.step)
                self._counters.failure("a replica could not be delivered", replication.error)
            replication.done.set()
            self._worker.wake()

        try:
            self._exchange.send(slot, record, over)
        except Exception as error:
            over(as_flashpoint(error, rank=self._session.ranks.rank, step=ticket.step))
        return replication

    def _say_ready(self, ticket: Ticket) -> None:
        """Before the digests are computed: the next save may be near."""
        try:
            self._settlement.gate.look(ticket.opening)
        except FlashpointError as error:
            self._counters.failure("the other ranks could not be told that a slot is free", error)

    def _late(self, attributes: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What it gives, after whatever wait: no save may have to wait for that, if all ranks have a slot."""
        longest_s = self._session.config.deadline_s + _SLACK_S
        return bounded(
            attributes, longest_s, "what is kept beside the state", meanwhile=self._settlement.glance, every_s=_GLANCE_S
        )

    def _watch(self) -> float | None:
        pause = self._settlement.watch()
        if self._exchange is not None:
            self._exchange.report()
        return pause
