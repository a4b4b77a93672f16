"""Timer blocks of ``megatron.core.timers.Timers.log``, which Megatron-LM and Megatron Bridge print after each save.

The spellings, as the releases print them (docs/integration-notes.md has the history)::

    (min, max) time across ranks (ms):
        save-checkpoint ................................: (18450.20, 18512.90)

    max time across ranks (ms):
        save-checkpoint ................................: 18512.90

    times across ranks (ms):
      save-checkpoint:
         rank  0: 18450.20
         rank  1: 18512.90

    time (ms) | save-checkpoint: 18512.90

From core 0.16 on the first line is a logging record and can carry the handler's format in front. Between the lines
of a block anything can stand that another rank wrote. A number always has two decimals and ends its line: anything
else was torn and is left out.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from mlflashpoint.timings.steps import Moment, StepClock

#: seconds per unit, as a log names it
UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "us": 1e-6}

#: lines of one stream after which a block can't go on
_REACH = 1000
#: streams that can have a block open at once
_STREAMS = 4096

#: what every line with a number ends with
_ENDS = frozenset(")0123456789")
_NUMBER = r"\d{1,15}\.\d\d"
_HEADER = re.compile(r"(?:\(min, max\) |max |\b)times? across ranks \((\w{1,10})\):$")
# a name is filled up with dots to 48 characters; a longer one has none
_ROW = re.compile(rf"(?:^|\s)(\S{{1,46}} \.+|\S{{47,200}} ): (?:\(({_NUMBER}), ({_NUMBER})\)|({_NUMBER}))$")
_NAME = re.compile(r"(?:^ *|[^ ] ?  )(\S{1,200}):$")
_RANK = re.compile(rf"(?:^|  )rank +(\d{{1,7}}): ({_NUMBER})$")
_FLAT = re.compile(r"(?:^|[\s:])time \((\w{1,10})\)((?: \| \S{1,200}: \d{1,15}\.\d\d)+)$")
_FLAT_ENTRY = re.compile(rf" \| (\S{{1,200}}): ({_NUMBER})")


@dataclass
class Row:
    """One timer of one block.

    Attributes:
        stream: writer of the block.
        timer: its name in the log.
        values: seconds: ``(max,)``, ``(min, max)``, or one per rank that the block lists.
        moment: where in the log the row began.
    """

    stream: str
    timer: str
    values: tuple[float, ...]
    moment: Moment


@dataclass
class _Block:
    scale: float
    age: int = 0
    timer: tuple[str, Moment] | None = None
    ranks: dict[int, float] = field(default_factory=dict)
    next_timer: tuple[str, Moment] | None = None


class TimerBlocks:
    """Reads lines in order and yields a Row per timer.

    Args:
        clock: follows the same lines, each of which it has been fed first.

    Attributes:
        torn: rows without a header (torn off, or in an unknown unit) and lists of ranks with one missing.
    """

    def __init__(self, clock: StepClock) -> None:
        self.torn = 0
        self._clock = clock
        self._open: OrderedDict[str, _Block] = OrderedDict()

    def feed(self, stream: str, text: str) -> Iterator[Row]:
        block = self._open.get(stream)
        last = text[-1:]
        if last == ":":
            if found := _HEADER.search(text):
                yield from self._close(stream)
                self._header(stream, found[1])
            elif block is not None and (found := _NAME.search(text)):
                block.next_timer = found[1], self._clock.moment(stream)
        elif last not in _ENDS:
            pass
        elif found := _ROW.search(text):
            if block is None:
                self.torn += 1
            else:
                numbers = tuple(float(number) * block.scale for number in found.groups()[1:] if number)
                yield Row(stream, found[1].rstrip(" ."), numbers, self._clock.moment(stream))
        elif found := _RANK.search(text):
            yield from self._rank(block, stream, int(found[1]), float(found[2]))
        elif "time (" in text and (found := _FLAT.search(text)):
            if (scale := UNITS.get(found[1])) is None:
                self.torn += 1
                return
            for name, value in _FLAT_ENTRY.findall(found[2]):
                yield Row(stream, name, (float(value) * scale,), self._clock.moment(stream))
        if block is not None:
            block.age += 1
            if block.age > _REACH:
                yield from self._close(stream)

    def finish(self) -> Iterator[Row]:
        """What is still open when the log ends."""
        for stream in list(self._open):
            yield from self._close(stream)

    def _header(self, stream: str, unit: str) -> None:
        if (scale := UNITS.get(unit)) is None:
            self.torn += 1
            return
        while len(self._open) >= _STREAMS:
            self._open.popitem(last=False)
        self._open[stream] = _Block(scale)

    def _rank(self, block: _Block | None, stream: str, rank: int, value: float) -> Iterator[Row]:
        if block is None or (block.timer is None and block.next_timer is None):
            self.torn += 1
            return
        if block.next_timer is not None:
            # a rank that goes on where the list stopped: the name in between was another writer's
            if not (block.ranks and rank == max(block.ranks) + 1):
                yield from self._end_of_ranks(stream, block)
                block.timer = block.next_timer
            block.next_timer = None
        block.ranks.setdefault(rank, value * block.scale)

    def _end_of_ranks(self, stream: str, block: _Block) -> Iterator[Row]:
        ranks, block.ranks = block.ranks, {}
        if block.timer is None or not ranks:
            return
        if len(ranks) != max(ranks) + 1:
            self.torn += 1
            return
        name, moment = block.timer
        yield Row(stream, name, tuple(ranks[rank] for rank in sorted(ranks)), moment)

    def _close(self, stream: str) -> Iterator[Row]:
        block = self._open.pop(stream, None)
        if block is not None:
            yield from self._end_of_ranks(stream, block)
