"""The gate: whether the next save is staged, decided for all ranks at once and, as a rule, long before it comes.

A version that one rank has no slot for is lost on all of them. So each rank says in the background, behind every save,
when it has a slot for the next one; the last to say so opens the gate, and so does whoever sees the save complete, for
then every rank has a slot. A rank that waits in vain shuts it. The first decision to reach the job's store holds, and a
rank stages nothing before it knows of one: so all of them do, or none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from mlflashpoint.core.ledger import Decision, Ledger


@dataclass
class Opening:
    """The gate in front of one save.

    Attributes:
        epoch: rollbacks within the process before it.
        after: step of the save before it, -1 for none since the rollback.
        before: step of the save behind it, None until that has begun on this rank.
        ready: whether this rank has said that it has a slot for it.
        bound: whether others may have heard that nothing of this rank stands against it.
        given_up: why this rank waits no longer, None while it would.
        decision: the same for all ranks; None while this one knows of none.
    """

    epoch: int
    after: int
    before: int | None = None
    ready: bool = False
    bound: bool = False
    given_up: str | None = None
    decision: Decision | None = None


class Gate:
    """One rank's view; ``next``, ``enter``, ``verdict`` and ``give_up`` are for the training thread.

    The rest is for the background, and so is ``give_up``.

    Args:
        world_size: ranks that save together; one alone has nothing to agree on.
        ledger: the ledger of an epoch, None as long as this rank does not know the others.
        free: whether this rank has a slot to write to, or none that it would wait for.
        decided: called when a decision becomes known.
    """

    def __init__(
        self,
        world_size: int,
        ledger: Callable[[int], Ledger | None],
        free: Callable[[], bool],
        decided: Callable[[], None],
    ) -> None:
        self._world_size = world_size
        self._ledger = ledger
        self._free = free
        self._decided = decided
        self._lock = threading.Lock()
        # Nothing is under way before the first save, so every rank has a slot for it.
        self._opening: Opening | None = None

    def next(self, epoch: int, after: int) -> Opening | None:
        """From now on it is about the save that follows that of step ``after``; None if there is nothing to decide."""
        self._opening = Opening(epoch, after) if self._world_size > 1 else None
        return self._opening

    @property
    def opening(self) -> Opening | None:
        """That of the next save, None if there is nothing to decide."""
        return self._opening

    def enter(self, step: int) -> Opening | None:
        """The save of ``step`` is the next one; returns its opening, None if there is nothing to decide."""
        opening = self._opening
        if opening is not None:
            opening.before = step
        return opening

    def verdict(self) -> bool | None:
        """Whether all ranks stage the next save, or none does; None while that is not known."""
        opening = self._opening
        if opening is None:
            return True
        decision = opening.decision
        if decision is None or decision.yes:
            return None if decision is None else True
        # If this rank never began the save that the others skipped, theirs has another gate, which it can't know of.
        return opening.before is not None and 0 <= decision.before < opening.before

    @property
    def reason(self) -> str:
        """Why the next save is not staged."""
        opening = self._opening
        return "" if opening is None or opening.decision is None else opening.decision.reason

    def give_up(self, why: str, opening: Opening | None) -> bool:
        """Wait no longer; returns whether that alone keeps every other rank from staging the save behind it."""
        if opening is None:
            return True
        with self._lock:
            opening.given_up = opening.given_up or why
            return not opening.bound and opening.decision is None

    def before_commit(self, opening: Opening | None) -> None:
        """To be called before this rank tells that the save before ``opening`` is done, which may open it."""
        if opening is not None and not self._bind(opening):
            self.look(opening)

    def before_fail(self, opening: Opening | None) -> None:
        """To be called before this rank tells that it has no shard of the save behind ``opening``: why it waited no
        longer is what the others are to be told.
        """
        if opening is not None and opening.given_up is not None:
            self.look(opening)

    @property
    def undecided(self) -> bool:
        """Whether a decision may come that this rank looks for."""
        opening = self._opening
        return opening is not None and opening.decision is None and opening.bound

    def look(self, opening: Opening | None) -> None:
        """Say what is to be said at ``opening``, and see what is decided there.

        Raises:
            PeerError: the store can't be reached. What was to be said then is not said again: it would count twice.
        """
        ledger = None if opening is None or opening.decision is not None else self._ledger(opening.epoch)
        if opening is None or ledger is None:
            return
        if opening.given_up is not None:
            before = -1 if opening.before is None else opening.before
            self._know(opening, ledger.shut(opening.after, opening.given_up, before=before))
            return
        able = not opening.ready and self._free()
        if not (able or opening.ready or opening.before is not None):
            return
        decision = ledger.opening(opening.after)
        if decision is None and able and self._bind(opening):
            opening.ready = True
            decision = ledger.ready(opening.after)
        if decision is None and opening.ready and opening.before is not None:
            decision = ledger.missed(opening.after, by=opening.before)
        self._know(opening, decision)

    def _bind(self, opening: Opening) -> bool:
        with self._lock:
            opening.bound = opening.bound or opening.given_up is None
            return opening.given_up is None

    def _know(self, opening: Opening, decision: Decision | None) -> None:
        if decision is not None:
            with self._lock:
                opening.decision = decision
            self._decided()
