"""The settlement: this rank's dealings with the ledger, in the background, and what they mean for its slots."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from mlflashpoint.core.counters import Counters
from mlflashpoint.core.gate import Gate
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.ledger import Ledger, Verdict
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.session import Session
from mlflashpoint.core.ticket import Replication, Ticket, went_back
from mlflashpoint.errors import FlashpointError, StepError

log = logging.getLogger("mlflashpoint.core")

_LONGEST_PAUSE_S = 5.0
_WAITING_PAUSE_S = 0.1
#: so many complete versions later, no slot holds anything of an earlier epoch
_ENOUGH_COMPLETE = 16
#: epochs before the present one whose ledgers are kept, however little was saved since
_KEPT_EPOCHS = 8
_KEPT_REASONS = 16
#: before the reason of the rank that has said it
_RANK = re.compile(r"^rank \d+: ")


def shortest_pause(world_size: int) -> float:
    """Seconds between two looks at the job's store: many ranks ask one, so the more there are the less often each."""
    return 0.005 + world_size / 20_000


class Settlement:
    """Announces this rank's saves and reads the verdicts; for one thread, but for ``await_slot``, ``slot_awaited`` and
    ``await_told``.

    What is announced keeps its order: a save counts as begun only when the outcome of the one before it has been told,
    which may have to wait for replicas. Else the others could hold a version that is still on its way to be overtaken.

    Args:
        session: an opened session.
        counters: where to count.
        pool: the slots that verdicts free.
        free: whether this rank has a slot to write to, or none that it would wait for.
        joined: called whenever this rank knows its place among the others. Must not raise.

    Attributes:
        gate: whether the next save is staged, on all ranks or on none.
    """

    def __init__(
        self,
        session: Session,
        counters: Counters,
        pool: SlotPool,
        free: Callable[[], bool],
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_joined = joined
        self._to_tell: deque[tuple[threading.Event | None, Callable[[], None]]] = deque()
        self._told = threading.Condition()
        self._session = session
        self._counters = counters
        self._pool = pool
        self._ledgers: dict[int, Ledger] = {}
        self._complete: dict[int, int] = {}
        self._waiting: Ticket | None = None
        #: what was waiting at the last look, and when the next one is due
        self._looked: tuple[Ticket | None, float] = (None, 0.0)
        self.gate = Gate(session.ranks.world_size, self._ledger_if_joined, free, pool.notify)
        self._pause = 0.0
        #: the reasons that were told of versions that are incomplete
        self._reasons: deque[str] = deque(maxlen=_KEPT_REASONS)
        #: epoch that other ranks have left where this one had not, and the step that they went back to
        self._left: tuple[int, int] | None = None

    @property
    def world_size(self) -> int:
        """Ranks that save together."""
        return self._session.ranks.world_size

    @property
    def storeless(self) -> str:
        """Which ranks have no memory store, in words; empty for none, and before this rank knows."""
        joined = self._session.joined_already
        return "" if joined is None else joined.placement.storeless

    def start(self, epoch: int) -> Incarnation:
        """The incarnation of a save; joins the other ranks at the first call. Raises FlashpointError."""
        self._session.joined()
        self._on_joined()
        return self._session.incarnation(epoch)

    def attempt(self, ticket: Ticket) -> None:
        """Tell that this rank begins the save, or will not take part, once it is done with all earlier ones."""
        if not ticket.announced:
            ticket.announced = True
            self._in_turn(None, lambda: self._attempt(ticket))

    def commit(self, ticket: Ticket, replication: Replication | None = None) -> None:
        """Tell that the shard is committed, once its replicas are acknowledged, or that it is not, if one failed."""
        self._in_turn(
            None if replication is None else replication.done,
            lambda: self._conclude(ticket, None if replication is None else replication.error),
        )

    def fail(self, ticket: Ticket, error: FlashpointError) -> None:
        """Tell that this rank has no shard of that step."""
        self.attempt(ticket)
        try:
            version = Version(self.start(ticket.epoch).number, ticket.step)
            self.gate.before_fail(ticket.entrance)
            self._settle(version, self._ledger(ticket.epoch).fail(ticket.step, error.message))
        except FlashpointError as unreachable:
            self._counters.failure("the other ranks could not be told of a failed save", unreachable)

    def go_back(self, epoch: int, step: int, given_up: list[Version]) -> None:
        """Tell that training went back to ``step``, which began ``epoch``.

        What lies above it is told as failed. A rank that has not gone back with the others would else complete it, with
        a shard of what came after.
        """
        if self._session.joined_already is None:
            return
        try:
            self._ledger(epoch - 1).leave(step)
            for version in given_up:
                ledger = self._ledger(version.incarnation - self._session.incarnation(0).number)
                self._settle(version, ledger.fail(version.step, went_back(step)))
        except FlashpointError as unreachable:
            self._counters.failure("the other ranks could not be told that training went back", unreachable)

    def require_in_step(self, ticket: Ticket) -> None:
        """Raises StepError if the other ranks had gone back before the save began, without this one; asks nobody."""
        epoch, step = self._left or (-1, -1)
        if epoch == ticket.epoch and ticket.step > step:
            raise StepError(
                f"on the other ranks {went_back(step)}, on this one it did not: what it saves fits nothing of theirs",
                remedy="call resumed(step) on every rank whenever training goes back, and restart the job: until then "
                "no version is complete",
            )

    def await_told(self, timeout_s: float) -> bool:
        """Wait until the outcome of every save has been told; False if ``timeout_s`` seconds did not suffice."""
        with self._told:
            return self._told.wait_for(lambda: not self._to_tell, timeout_s)

    def _in_turn(self, ready: threading.Event | None, tell: Callable[[], None]) -> None:
        with self._told:
            self._to_tell.append((ready, tell))
        self._tell()

    def _tell(self) -> None:
        """Announce what is due, in order."""
        while self._to_tell and ((ready := self._to_tell[0][0]) is None or ready.is_set()):
            try:
                self._to_tell[0][1]()
            finally:
                with self._told:
                    self._to_tell.popleft()
                    self._told.notify_all()

    def _attempt(self, ticket: Ticket) -> None:
        try:
            self.start(ticket.epoch)
            ticket.attempted = True
            self._ledger(ticket.epoch).attempt(ticket.step)
        except FlashpointError as error:
            # The shard is committed all the same: recovery goes by what lies in memory.
            self._counters.failure("the other ranks could not be told of a save", error)

    def _conclude(self, ticket: Ticket, error: FlashpointError | None) -> None:
        behind = [step for step in self._session.resumed_from[ticket.epoch + 1 :] if step is not None]
        if error is None and behind and ticket.step > min(behind):
            error = StepError(went_back(min(behind)))
        if error is not None:
            self.fail(ticket, error)
            return
        try:
            self.gate.before_commit(ticket.opening)
            version = Version(self._session.incarnation(ticket.epoch).number, ticket.step)
            self._settle(version, self._ledger(ticket.epoch).commit(ticket.step))
            self._pause = 0.0
        except FlashpointError as unreachable:
            # It is then unknown whether the others were told: the version stays open, and protected.
            self._counters.failure("a commit could not be announced", unreachable)

    def await_slot(self, ticket: Ticket) -> None:
        """From now on the training thread waits for a slot for ``ticket``, at its entrance."""
        self._waiting = ticket

    def slot_awaited(self) -> None:
        """The training thread waits no longer."""
        self._waiting = None

    def glance(self) -> None:
        """``watch`` if the training thread waits for a slot and a look is due; for jobs that take long."""
        waiting, (watched, due) = self._waiting, self._looked
        if waiting is not None and (waiting is not watched or time.monotonic() >= due):
            self.watch()

    def watch(self) -> float | None:
        """Look for verdicts that are open; returns the pause in seconds before the next look, None for none."""
        # One that waits anew has another entrance: what is found out here must not be taken for the next save's.
        waiting = self._waiting
        if waiting is not self._looked[0]:
            # What it waits for may be there in a moment: look often at first, however long nothing has come.
            self._pause = 0.0
        pause = self._look_for(waiting)
        self._looked = waiting, time.monotonic() + (pause or 0.0)
        return pause

    def _look_for(self, waiting: Ticket | None) -> float | None:
        try:
            self._tell()
            for version in self._pool.open_versions():
                self._look(version, waiting)
            if waiting is not None and waiting.attempted:
                verdict = self._ledger(waiting.epoch).verdict(waiting.step)
                if verdict is not None and not verdict.complete:
                    self.gate.give_up(f"another rank has no shard of step {waiting.step}", waiting.entrance)
            self.gate.look(self.gate.opening if waiting is None else waiting.entrance)
            if waiting is None and not self._pool.open_versions() and not self.gate.undecided:
                self._pause = 0.0
                return None
        except FlashpointError as error:
            self._counters.failure("the verdict on a version could not be read", error)
            self._pause = _LONGEST_PAUSE_S
        except Exception:
            log.exception("looking for verdicts failed")
            self._pause = _LONGEST_PAUSE_S
        shortest = shortest_pause(self.world_size)
        longest = _LONGEST_PAUSE_S if waiting is None else max(shortest, _WAITING_PAUSE_S)
        self._pause = min(max(self._pause * 2, shortest), longest)
        return self._pause

    def _look(self, version: Version, waiting: Ticket | None) -> None:
        epoch = version.incarnation - self._session.incarnation(0).number
        ledger = self._ledger(epoch)
        verdict = ledger.verdict(version.step)
        if verdict is None and waiting is not None and self._overtaken(version.step, epoch, waiting):
            verdict = ledger.fail(version.step, "some rank did not save it")
        self._settle(version, verdict)

    def _overtaken(self, step: int, epoch: int, by: Ticket) -> bool:
        """Whether every rank has begun the save ``by``, which comes later, maybe after a rollback."""
        if by.epoch == epoch:
            return self._ledger(epoch).overtaken(step, by=by.step)
        return by.epoch > epoch and self._ledger(by.epoch).begun(by.step)

    def _settle(self, version: Version, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        self._pool.settle(version, complete=verdict.complete)
        if not verdict.complete:
            self._listen(version.incarnation - self._session.incarnation(0).number)
        self._counters.add("versions_complete" if verdict.complete else "versions_failed")
        if verdict.complete:
            self._counters.raise_to("last_complete_step", version.step)
            log.debug("step %d is complete on all ranks", version.step)
            self._forget_epochs(version.incarnation - self._session.incarnation(0).number)
        else:
            # Ranks that can't save say so at every save, now one and then another of them.
            cause = _RANK.sub("", verdict.reason)
            told = cause in self._reasons or self._counters.is_lasting(cause)
            if not told:
                self._reasons.append(cause)
            level = logging.DEBUG if told else logging.INFO
            log.log(level, "the memory version of step %d is incomplete: %s", version.step, verdict.reason)

    def _listen(self, epoch: int) -> None:
        """A version of ``epoch`` has failed: hear whether the others have gone back, and this rank has not."""
        if epoch != self._session.epoch or (self._left is not None and self._left[0] == epoch):
            return
        step = self._ledger(epoch).left()
        if step is not None:
            self._left = epoch, step
            # This node is to know it too, whatever becomes of the others.
            self._session.remember(Lineage((self._session.incarnation(epoch).rolled_back(step),)))

    def _forget_epochs(self, present: int) -> None:
        """A version of the epoch ``present`` is complete: give up the ledgers that no rank asks any more."""
        self._complete[present] = self._complete.get(present, 0) + 1
        kept = 0 if self._complete[present] >= _ENOUGH_COMPLETE else _KEPT_EPOCHS
        for epoch in [epoch for epoch in self._ledgers if epoch < present - kept]:
            self._ledgers.pop(epoch).end()
            self._complete.pop(epoch, None)

    def _ledger_if_joined(self, epoch: int) -> Ledger | None:
        return None if self._session.joined_already is None else self._ledger(epoch)

    def _ledger(self, epoch: int) -> Ledger:
        ledger = self._ledgers.get(epoch)
        if ledger is None:
            run = self._session.incarnation(epoch).run
            channel = self._session.channel().under(f"run-{run}/ledger")
            ranks = self._session.ranks
            ledger = self._ledgers[epoch] = Ledger(channel, rank=ranks.rank, world_size=ranks.world_size)
        return ledger
