"""Which training step a timer block belongs to: the block itself does not say.

Two lines tell. The last rank, which prints the blocks, prints ``iteration N/M`` for the steps that are logged; rank 0
prints ``saving checkpoint at iteration N`` before each save. Output of different ranks can be shifted against each
other by what their pipes hold back, so the first one wins where both are known. The step is for display and for
recognising copies of a line; no time depends on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_ITERATION = re.compile(r" iteration +(\d{1,15})/ *(\d{1,15}) \|")
_RL_STEP = re.compile(r"={5,} Step (\d{1,15})/(\d{1,15}) ={5,}$")
_SAVING = re.compile(r"[Ss]aving checkpoint (?:at iteration|for step) +(\d{1,15})\b")
#: saves that rank 0 can be ahead of the last rank's output
_AHEAD = 256
_STREAMS = 4096


@dataclass
class _Announced:
    step: int
    told: bool = False


class Moment(NamedTuple):
    """A place in the log.

    Attributes:
        epoch: grows with every sign that training has gone on to another step.
        last: the step that the writer logged last, None if it has logged none.
        announced: the saves that rank 0 has announced up to here.
    """

    epoch: int
    last: int | None
    announced: tuple[_Announced, ...]


class StepClock:
    """Follows a log and answers for a place in it, also when the log has gone on since.

    Attributes:
        total: steps that the training is to have, None if the log does not tell.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self._epoch = 0
        self._last: dict[str, int] = {}
        self._announced: list[_Announced] = []

    def feed(self, stream: str, text: str) -> bool | None:
        """Returns, if the line tells a step of the training, whether its writer has gone back to it."""
        found = None
        if " iteration " in text:
            found = _ITERATION.search(text)
        elif "= Step " in text:
            found = _RL_STEP.search(text)
        if found:
            self.total = int(found[2])
            step, last = int(found[1]), self._last.get(stream)
            if last != step:
                if len(self._last) > _STREAMS:
                    self._last.clear()
                self._last[stream] = step
                self._epoch += 1
            return last is not None and step < last
        if "aving checkpoint" in text and (found := _SAVING.search(text)):
            self._announce(int(found[1]))
        return None

    def moment(self, stream: str) -> Moment:
        return Moment(self._epoch, self._last.get(stream), tuple(self._announced))

    def step_of_save(self, moment: Moment) -> int | None:
        """The step of a save that was printed at ``moment``, None if nothing tells; each is told once."""
        for announced in moment.announced:
            told, announced.told = announced.told, True
            if not told and (moment.last is None or announced.step >= moment.last):
                return announced.step
        return moment.last

    def _announce(self, step: int) -> None:
        newest = self._announced[-1].step if self._announced else -1
        if step == newest:
            return
        if step < newest:
            self._announced.clear()  # the job has started over
        untold = [announced for announced in self._announced[-_AHEAD:] if not announced.told]
        self._announced = [*untold, _Announced(step)]
        self._epoch += 1
