"""How often the job whose log it is has started over: a scheduler that requeues a job appends to its log."""

from __future__ import annotations

from collections import deque

from mlflashpoint.timings.records import RankRecord

#: lines of training steps that a copy of the log in the same file may lag behind
_LAG = 4096


class Attempts:
    """Follows a log's samples, and what else tells that training began again.

    A start that no sample follows counts for nothing, so that several signs of one can be told.

    Attributes:
        current: index of the attempt that the next sample belongs to.
    """

    def __init__(self) -> None:
        self.current = 0
        self._sampled = False
        self._recent: deque[int] = deque(maxlen=_LAG)
        self._resumed: int | None = None
        #: newest step by timer, and by timer and rank
        self._blocks: dict[str, int] = {}
        self._records: dict[tuple[str, int], int] = {}
        #: newest incarnation by timer, and the attempt that was going on when it was seen first
        self._incarnations: dict[str, tuple[int, int]] = {}

    def stepped(self, text: str, back: bool) -> None:
        """A writer has logged a training step, ``back`` from the one that it logged before."""
        # NeMo RL's line of a step is the same in every attempt; Megatron's, with times and a loss, only in a copy
        copied = " iteration " in text and hash(text) in self._recent
        if back and not copied:
            self._begin()
        self._recent.append(hash(text))

    def resumed(self, step: int) -> None:
        """The job has loaded a checkpoint of ``step``; every rank may say so."""
        if step != self._resumed:
            self._begin()
        self._resumed = step

    def block(self, timer: str, step: int | None) -> int:
        """The attempt of a save that a block tells, and that is no copy."""
        if step is not None:
            if step < self._blocks.get(timer, 0):
                self._begin()
            self._blocks[timer] = step
        self._sampled = True
        return self.current

    def record(self, record: RankRecord, new: bool) -> int | None:
        """The attempt of the save of a rank's record, which is no copy; None if it is known already.

        Args:
            record: what the rank told.
            new: whether no rank has told of the save before.
        """
        key = record.timer, record.rank
        # each rank's own lines are in order, whatever stands between them
        if new and record.step is not None and record.step < self._records.get(key, 0):
            self._begin()
        if record.step is not None:
            self._records[key] = record.step
        known, attempt = self._incarnations.get(record.timer, (0, 0))
        later = 0 < known < record.incarnation
        if later and attempt == self.current:
            self._begin()
        if record.incarnation > known:
            self._incarnations[record.timer] = record.incarnation, self.current
        self._sampled = self._sampled or new
        # a rank's first line can come before it knows the incarnation
        return self.current if new or later else None

    def _begin(self) -> None:
        if self._sampled:
            self.current += 1
            self._sampled = False
            self._blocks.clear()
