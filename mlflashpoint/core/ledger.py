"""The ledger: what all ranks hold to be true of each version of one incarnation, kept in the job's store.

A version is *complete* or *failed* by one verdict, settled once for all ranks by compare-and-set. Counting commits
alone would not do: a rank could give a version up at the moment when another sees the last commit arrive, and the two
would then overwrite different versions. With a verdict the first one to arrive holds, and a rank that has not read it
treats the version as open and overwrites nothing.

Keys, per step: ``attempts``, ``commits`` and ``ready`` (counters of ranks), ``verdict``, and ``next``: whether the save
behind it is staged. Step -1 stands for none yet. A rank's background thread works one save after the other, so once
every rank has begun a later save, an open version can never become complete any more. Beside them ``left``, once
training has gone back: the step that it went back to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.round import Question, settle
from mlflashpoint.errors import PeerError

#: how many saves back the keys of a settled step are kept
_HISTORY = 32
_MAX_REASON = 300
#: stands for the save before the first one
_NO_STEP = -1
_LEFT = "left"
_KEYS = ("attempts", "commits", "verdict", "ready", "next")


@dataclass(frozen=True)
class Verdict:
    """What became of a version: ``complete``, or failed for ``reason``."""

    complete: bool
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """Whether the save behind a version is staged, on all ranks: ``yes``, or not for ``reason``.

    Attributes:
        before: step of that save; -1 with a yes, which may come before anybody knows it.
    """

    yes: bool
    reason: str = ""
    before: int = -1


class Ledger:
    """One rank's view of the verdicts of one incarnation; used by one thread.

    Args:
        channel: talk under a prefix that only this incarnation of this group uses.
        rank: this rank.
        world_size: ranks that must commit.

    Every method raises PeerError when the store can't be reached; the version is then open until it can.
    """

    def __init__(self, channel: Channel, *, rank: int, world_size: int) -> None:
        self._channel = channel
        self._rank = rank
        self._world_size = world_size
        self._verdicts: dict[int, Verdict] = {}
        #: steps whose keys are not deleted yet
        self._history: deque[int] = deque([_NO_STEP])
        #: those of which this rank tells the store: the first rank to begin a step does
        self._own = {_NO_STEP} if rank == 0 else set()
        self._left_by_me = False

    def attempt(self, step: int) -> None:
        """Tell that this rank begins the save of ``step``, or will not take part in it."""
        self._history.append(step)
        # A call whose answer is lost may have been the first.
        self._own.add(step)
        if self._channel.add(f"{step}/attempts") > 1:
            self._own.discard(step)
        self._forget_old()

    def commit(self, step: int) -> Verdict | None:
        """Tell, once per step, that this rank's shard is committed and replicated; returns the verdict if settled."""
        if self._channel.add(f"{step}/commits") == self._world_size:
            verdict = self._settle(step, Verdict(complete=True))
            if verdict.complete:
                # On every rank all saves up to this one are over, so that all slots but one are free.
                self._decide(step, Decision(yes=True))
            return verdict
        return self.verdict(step)

    def fail(self, step: int, reason: str) -> Verdict:
        """Declare ``step`` failed; returns the verdict that holds, which may be the opposite if it came first."""
        return self._settle(step, Verdict(complete=False, reason=f"rank {self._rank}: {reason}"[:_MAX_REASON]))

    def verdict(self, step: int) -> Verdict | None:
        """The verdict of ``step``, None while it is open."""
        if step not in self._verdicts:
            raw = self._channel.read(f"{step}/verdict")
            if raw is None:
                return None
            self._verdicts[step] = _from_json(step, raw)
        return self._verdicts[step]

    def overtaken(self, step: int, by: int) -> bool:
        """Whether every rank began the save of ``by``, a later one: ``step``, if open, can't become complete."""
        return by > step and self.begun(by)

    def begun(self, step: int) -> bool:
        """Whether every rank began the save of ``step``, so that it has told of all its saves before that."""
        return self._channel.add(f"{step}/attempts", 0) >= self._world_size

    def leave(self, step: int) -> None:
        """Tell that training has gone back to ``step``, which ends this incarnation; -1 for what is not known."""
        raw = self._channel.decide(_LEFT, [step, self._rank])
        self._left_by_me = isinstance(raw, list) and raw[1:] == [self._rank]

    def left(self) -> int | None:
        """Step that training has gone back to, as a rank has told that knows of it; None if none has."""
        raw = self._channel.read(_LEFT)
        if raw is not None and (not isinstance(raw, list) or [type(item) for item in raw] != [int, int]):
            raise PeerError("what the job's store has of a rollback is malformed")
        return None if raw is None else raw[0]

    def ready(self, step: int) -> Decision | None:
        """Tell, once per step, that this rank has a slot for the save behind ``step``; returns the decision if made."""
        ready = self._channel.add(f"{step}/ready")
        if step == _NO_STEP and ready == 1:
            # Nobody begins that one, and rank 0 may never come here.
            self._own.add(step)
        return self._decide(step, Decision(yes=True)) if ready >= self._world_size else None

    def missed(self, step: int, by: int) -> Decision | None:
        """The decision if every rank that began ``step`` has a slot, and all have begun ``by``, the save behind it.

        Whoever has not begun ``step`` by then never will, and would never say that it is ready. Where no save came
        before, there is none to have begun, and every rank's word is waited for.
        """
        if step == _NO_STEP or not self.overtaken(step, by):
            return None
        ready, begun = (self._channel.add(f"{step}/{key}", 0) for key in ("ready", "attempts"))
        return self._decide(step, Decision(yes=True)) if ready >= begun else None

    def shut(self, step: int, reason: str, before: int) -> Decision:
        """Propose that no rank stages the save of ``before``, behind ``step``; returns the decision that holds."""
        return self._decide(step, Decision(False, f"rank {self._rank}: {reason}"[:_MAX_REASON], before))

    def opening(self, step: int) -> Decision | None:
        """What is decided about the save behind ``step``, None for nothing yet."""
        raw = self._channel.read(f"{step}/next")
        return None if raw is None else _decision(step, raw)

    def _decide(self, step: int, proposal: Decision) -> Decision:
        raw = self._channel.decide(f"{step}/next", [proposal.yes, proposal.reason, proposal.before])
        return _decision(step, raw)

    def _settle(self, step: int, proposal: Verdict) -> Verdict:
        raw = self._channel.decide(f"{step}/verdict", [proposal.complete, proposal.reason])
        return self._verdicts.setdefault(step, _from_json(step, raw))

    def end(self) -> None:
        """Delete all keys: nobody asks for these versions any more."""
        while self._history:
            self._delete(self._history.popleft())
        if self._left_by_me:
            self._channel.delete(_LEFT)

    def _forget_old(self) -> None:
        """Forget old steps, with their keys, but never the newest complete one, nor one that may become so.

        A rank that could not reach the store for long reads a deleted verdict as open. That is harmless for a failed
        version and for one that a newer complete one has superseded, and fatal for the newest complete one.
        """
        newest = max((step for step, verdict in self._verdicts.items() if verdict.complete), default=_NO_STEP)
        old = [self._history.popleft() for _ in range(len(self._history) - _HISTORY)]
        kept = []
        for step in old:
            verdict = self._verdicts.get(step)
            if step == _NO_STEP or step < newest or (verdict is not None and not verdict.complete):
                self._delete(step)
            else:
                kept.append(step)
        self._history.extendleft(reversed(kept))

    def _delete(self, step: int) -> None:
        self._verdicts.pop(step, None)
        if step in self._own:
            self._own.discard(step)
            self._channel.delete(*(f"{step}/{key}" for key in _KEYS))


def agree(channel: Channel, ok: bool, *, rank: int, world_size: int, deadline: Deadline) -> tuple[bool, str]:
    """Whether every rank says ``ok``: collective, one answer for all; ``channel``'s prefix is used for nothing else.

    A rank that waits until the deadline votes the whole down, and whatever was settled first holds for everyone.

    Returns:
        the answer and, if it is no, the reason.

    Raises:
        PeerError: the store can't be reached.
    """
    question = Question(
        "agree",
        yes=lambda _: [True, ""],
        no=lambda error: [False, error.message[:_MAX_REASON]],
        objection=None if ok else [False, f"rank {rank} said no"],
    )
    settled = settle(channel, question, rank=rank, size=world_size, deadline=deadline)
    assert settled is not None
    verdict = _from_json(-1, settled.outcome)
    return verdict.complete, verdict.reason


def _from_json(step: int, raw: object) -> Verdict:
    return Verdict(*_pair(step, raw))


def _decision(step: int, raw: object) -> Decision:
    if not isinstance(raw, list) or [type(item) for item in raw] != [bool, str, int]:
        raise PeerError("a decision in the job's store is malformed", step=step if step >= 0 else None)
    return Decision(*raw)


def _pair(step: int, raw: object) -> tuple[bool, str]:
    if not isinstance(raw, list) or [type(item) for item in raw] != [bool, str]:
        raise PeerError("a verdict in the job's store is malformed", step=step if step >= 0 else None)
    return raw[0], raw[1]
