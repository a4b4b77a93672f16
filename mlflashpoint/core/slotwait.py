"""The wait for a slot: how a save gets one, or is skipped by all ranks together after a bounded time."""

from __future__ import annotations

from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.settlement import Settlement, shortest_pause
from mlflashpoint.core.slots import RARER
from mlflashpoint.core.ticket import Ticket, went_back
from mlflashpoint.core.worker import Worker
from mlflashpoint.errors import SlotBusyError
from mlflashpoint.settings import StoreConfig

#: how long the job's store may take to tell what was decided, when a save has been waited for in vain
_ANSWER_S = 2.0
#: a wait this long is not halved: when the slots are free again, the ranks need a moment to tell each other
_SHORTEST_S = 0.25
#: and so many looks at the job's store, which each rank makes the more rarely the more there are
_LOOKS = 3
_MOST_HALVINGS = 10

#: for the first save after training went back: no rhythm of saves is at fault then
_FREE_SOON = (
    "none is needed if the next save succeeds, for the slot is free by then; MLFLASHPOINT_KEEP_VERSIONS=3 is one more "
    "slot, for a save right after going back"
)
_GO_BACK_TOO = (
    "let every rank go back as well and begin its next save, or call save_failed instead; look in the log of a rank "
    "that does not, or that is named here"
)
_START_AGAIN = "mend that and start the job again; until then nothing is saved to memory"
_SAY_SO = "let a rank that has nothing to save call save_failed"
_REACHABLE = f"if its holders can be reached (the log says so if not), {RARER}"


class SlotWait:
    """For the training thread.

    Args:
        config: says how long to wait; half as long each further time in a row that it was in vain, to a moment.
        pool: the slots.
        settlement: whether the other ranks have one too.
        worker: does what waits for the job's store.
        exchange: what may be sending a slot; None if there is nothing.
    """

    def __init__(
        self, config: StoreConfig, pool: SlotPool, settlement: Settlement, worker: Worker, exchange: Exchange | None
    ) -> None:
        self._config = config
        self._pool = pool
        self._settlement = settlement
        self._worker = worker
        self._exchange = exchange
        self._in_vain = 0
        self._shortest_s = max(_SHORTEST_S, _LOOKS * shortest_pause(settlement.world_size))

    def check(self) -> None:
        """Raise SlotBusyError if some rank has no memory store, as all ranks know: no save of this start can succeed.

        Apart from ``take`` and before there are slots: such a start leaves in memory what earlier ones left there.
        """
        if storeless := self._settlement.storeless:
            raise SlotBusyError(f"the ranks skip this save together: {storeless}", remedy=_START_AGAIN)

    def take(self, ticket: Ticket) -> int:
        """Index of a slot that nothing needs any more, marked busy, once every rank has one.

        Raises:
            SlotBusyError: some rank has none; the others are told, and skip the save as well.
        """
        gate = self._settlement.gate
        ticket.entrance = gate.enter(ticket.step)
        index = self._pool.take(0, gate.verdict)
        if index is None:
            index = self._wait(ticket)
        if index is None:
            self._in_vain = min(self._in_vain + 1, _MOST_HALVINGS)
            able = self._pool.available()
            why = gate.reason if able and gate.reason else self._why_not(ticket)
            raise SlotBusyError(f"the ranks skip this save together: {why}", remedy=self._remedy(ticket, able=able))
        self._in_vain = 0
        return index

    def _wait(self, ticket: Ticket) -> int | None:
        gate = self._settlement.gate
        # Beginning the save for all to see, before it is staged, tells them that nothing older is on its way here.
        self._settlement.await_slot(ticket)
        self._worker.submit(lambda: self._settlement.attempt(ticket))
        try:
            longest = self._config.busy_wait_s
            index = self._pool.take(self._halved(longest, min(longest, self._shortest_s)), gate.verdict)
            if index is not None or gate.verdict() is False:
                return index
            certain = gate.give_up(self._why_not(ticket), ticket.entrance)
            self._worker.wake()
            # Else the others have heard that this rank is ready, and may go on: it comes after them.
            return None if certain else self._pool.take(self._halved(_ANSWER_S, self._shortest_s), gate.verdict)
        finally:
            self._settlement.slot_awaited()

    def _halved(self, longest_s: float, shortest_s: float) -> float:
        return max(longest_s * 0.5**self._in_vain, shortest_s)

    def _why_not(self, ticket: Ticket) -> str:
        if ticket.back_at is None:
            if self._pool.available():
                return "another rank still needs all its slots, or did not begin the save before"
            return f"every slot is needed: an earlier version is not complete on all ranks{self._on_its_way()}"
        back = went_back(ticket.back_at)
        if self._pool.available():
            return f"{back}, and another rank has not begun a save since, or still needs all its slots"
        return f"{back}, and every slot is needed: {self._pool.obstacle()}{self._on_its_way()}"

    def _remedy(self, ticket: Ticket, *, able: bool) -> str:
        if ticket.back_at is not None:
            return _GO_BACK_TOO if able else _FREE_SOON
        if self._on_its_way():
            return _REACHABLE
        return f"{RARER}; {_SAY_SO}" if able else RARER

    def _on_its_way(self) -> str:
        lag = None if self._exchange is None else self._exchange.lag()
        if lag is None or not lag.shards_outstanding:
            return ""
        return f" ({lag.bytes_outstanding} bytes of its replicas are on their way for {lag.age_s:.1f} s)"
