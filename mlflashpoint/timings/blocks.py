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
else was torn, and is left out and counted.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mlflashpoint.timings.steps import Moment, StepClock

#: seconds per unit, as a log names it
UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "us": 1e-6}

#: lines of one stream after which a block can't go on
_REACH = 1000
#: streams that can have a block open at once
_STREAMS = 4096

_NUMBER = r"\d{1,15}\.\d\d"
_HEADER = re.compile(r"(?:\(min, max\) |max |\b)times? across ranks \((\w{1,10})\):$")
# a name is filled up with dots to 48 characters; a longer one has none
_ROW = re.compile(rf"(?:^|\s)(\S{{1,46}} \.+|\S{{47,200}} ): (?:\(({_NUMBER}), ({_NUMBER})\)|({_NUMBER}))$")
# where a line begins as one of these does, and something else follows, it was torn
_ROW_TORN = re.compile(r"(?:^|\s)(\S{1,46} \.+|\S{47,200} ):(?: |$)|^    (\S{1,46} \.{2})")
_RANK_TORN = re.compile(r"  rank +\d{1,7}:(?: |$)")
_FLAT_TORN = re.compile(r"(?:^|[\s:])time \(\w{1,10}\) \| (\S{1,200}):")
#: names, the surest last: a name is indented by two blanks, which a collector can cut off or put a prefix before
_NAMES = tuple(re.compile(rf"{start}(\S{{1,200}}):$") for start in ("^ ?", "[^ ] ?  ", "^  "))
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
        ranks: number of ranks that the block lists, None if it lists none.
    """

    stream: str
    timer: str
    values: tuple[float, ...]
    moment: Moment
    ranks: int | None = None


@dataclass
class _Block:
    scale: float
    age: int = 0
    timer: tuple[str, Moment] | None = None
    ranks: dict[int, float] = field(default_factory=dict)
    spoiled: bool = False
    nameless: bool = False
    next_timer: tuple[str, Moment] | None = None
    next_sure: int = 0


class TimerBlocks:
    """Reads lines in order and yields a Row per timer.

    Args:
        clock: follows the same lines, each of which it has been fed first.
        wanted: which timers are counted when they are torn.

    Attributes:
        torn: rows without a header (torn off, or in an unknown unit), rows and lists of ranks that are not whole or
            hold impossible numbers, and lists whose name is missing.
    """

    def __init__(self, clock: StepClock, wanted: Callable[[str], bool] = bool) -> None:
        self.torn = 0
        self._wanted = wanted
        self._clock = clock
        self._open: OrderedDict[str, _Block] = OrderedDict()

    def feed(self, stream: str, text: str) -> Iterator[Row]:
        block = self._open.get(stream)
        if text[-1:] == ":" and (found := _HEADER.search(text)):
            self._glued(block, text, found.start())
            yield from self._close(stream)
            self._header(stream, found[1])
        elif found := _ROW.search(text):
            self._glued(block, text, found.start())
            numbers = tuple(float(number) for number in found.groups()[1:] if number)
            if block is None or numbers[0] > numbers[-1]:
                self.torn += 1
            else:
                scaled = tuple(number * block.scale for number in numbers)
                yield Row(stream, found[1].rstrip(" ."), scaled, self._clock.moment(stream))
        elif found := _RANK.search(text):
            yield from self._rank(block, stream, int(found[1]), float(found[2]))
        elif "time (" in text and (found := _FLAT.search(text)):
            self._glued(block, text, found.start())
            if (scale := UNITS.get(found[1])) is None:
                self.torn += 1
                return
            for name, value in _FLAT_ENTRY.findall(found[2]):
                yield Row(stream, name, (float(value) * scale,), self._clock.moment(stream))
        elif block is not None:
            yield from self._rest(block, stream, text)
        elif "time (" in text and (found := _FLAT_TORN.search(text)):
            self.torn += self._wanted(found[1])
        if block is not None:
            block.age += 1
            if block.age > _REACH:
                yield from self._close(stream)

    def finish(self) -> Iterator[Row]:
        """What is still open when the log ends."""
        for stream in list(self._open):
            yield from self._close(stream)

    def _glued(self, block: _Block | None, text: str, start: int) -> None:
        """A line has lost its end, and what was found begins at ``start`` behind it: what it told is left out."""
        before = text[:start]
        if (found := _ROW_TORN.search(before)) or ("time (" in before and (found := _FLAT_TORN.search(before))):
            self._tear(found)
        elif block is not None and "rank " in before and _RANK_TORN.search(before):
            block.spoiled = True

    def _tear(self, found: re.Match[str]) -> None:
        self.torn += self._wanted(next(filter(None, found.groups())).rstrip(" ."))

    def _header(self, stream: str, unit: str) -> None:
        if (scale := UNITS.get(unit)) is None:
            self.torn += 1
            return
        while len(self._open) >= _STREAMS:
            self._open.popitem(last=False)
        self._open[stream] = _Block(scale)

    def _rest(self, block: _Block, stream: str, text: str) -> Iterator[Row]:
        """A line that holds no number: the name of a list, something torn, or another writer's."""
        if (found := _ROW_TORN.search(text)) or ("time (" in text and (found := _FLAT_TORN.search(text))):
            self._tear(found)
        elif "rank " in text and _RANK_TORN.search(text):
            yield from self._next_list(block, stream, None)
            block.spoiled = True
        elif text[-1:] == ":":
            self._name(block, stream, text)

    def _name(self, block: _Block, stream: str, text: str) -> None:
        for sure in range(len(_NAMES) - 1, -1, -1):
            if found := _NAMES[sure].search(text):
                break
        else:
            return
        if block.next_timer is not None:
            if sure < block.next_sure:
                return
            if sure == block.next_sure and found[1] != block.next_timer[0]:
                # two names and one list: which of them it belongs to can't be told
                self.torn += self._wanted(block.next_timer[0])
        block.next_timer, block.next_sure = (found[1], self._clock.moment(stream)), sure

    def _rank(self, block: _Block | None, stream: str, rank: int, value: float) -> Iterator[Row]:
        if block is None:
            self.torn += 1
            return
        yield from self._next_list(block, stream, rank)
        seconds = value * block.scale
        if block.timer is not None and block.ranks.get(rank, seconds) != seconds:
            # another list has begun, and its name was not there
            yield from self._end_of_ranks(stream, block)
            block.timer = None
        if block.timer is None:
            self.torn += not block.nameless
            block.nameless = True
            return
        block.ranks.setdefault(rank, seconds)

    def _next_list(self, block: _Block, stream: str, rank: int | None) -> Iterator[Row]:
        """A line of a list has come: it is the next list's if a name stands before it."""
        if block.next_timer is None:
            return
        # a rank that goes on where the list stopped: the name in between was another writer's
        if rank is None or not (block.ranks and rank == max(block.ranks) + 1):
            yield from self._end_of_ranks(stream, block)
            block.timer, block.nameless = block.next_timer, False
        block.next_timer = None

    def _end_of_ranks(self, stream: str, block: _Block) -> Iterator[Row]:
        ranks, block.ranks = block.ranks, {}
        spoiled, block.spoiled = block.spoiled, False
        if block.timer is None or not (ranks or spoiled):
            return
        if spoiled or len(ranks) != max(ranks) + 1:
            self.torn += 1
            return
        name, moment = block.timer
        yield Row(stream, name, tuple(ranks[rank] for rank in sorted(ranks)), moment, len(ranks))

    def _close(self, stream: str) -> Iterator[Row]:
        block = self._open.pop(stream, None)
        if block is not None:
            yield from self._end_of_ranks(stream, block)
            if block.next_timer is not None and block.next_sure == len(_NAMES) - 1:
                self.torn += self._wanted(block.next_timer[0])
