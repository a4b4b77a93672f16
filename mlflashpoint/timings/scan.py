"""Everything that one log tells of checkpoint times, line by line, in memory that grows with the saves alone."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflashpoint.timings import blocks, prefix, records
from mlflashpoint.timings.attempts import Attempts
from mlflashpoint.timings.overlap import Series, Told
from mlflashpoint.timings.repeats import RowFilter
from mlflashpoint.timings.saves import RankedSaves
from mlflashpoint.timings.steps import StepClock

#: a line without any of these tells nothing
WORDS = (
    b"across ranks",
    b".: ",
    # a long name has no dots
    b" : ",
    # a row that was cut
    b" ..",
    b": (",
    b"time (",
    # the name above a list of ranks, and the list
    b":\n",
    # words can stand in the text once colours, and the escapes of JSON, are taken off
    b"\x1b",
    *(f'"{key}"'.encode() for key in prefix.KEYS),
    b"across cluster]",
    b"rank ",
    b"iteration",
    b"aving checkpoint",
    b" Step ",
    b"mlflashpoint ",
    b"Global Checkpoint ",
    # the bullet of NeMo RL's tables
    b"\xe2\x80\xa2 ",
    b"successfully ",
    b"parameters on",
    b"world size",
)
_PARAMETERS = re.compile(r"number of parameters on \([^)]*\) model parallel rank \(0(?:, 0)*\): +(\d{1,20})$")
_WORLD_SIZE = re.compile(r"using world size: (\d{1,9}),")
_SAVED = re.compile(r"successfully saved (?:local )?checkpoint from iteration", re.IGNORECASE)
_RESUMED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d{1,15})$")

#: names of timers that fit into a message
_MOST_REFUSED = 20

#: framework -> what its logs are recognised by
MEGATRON, NEMO, NEMO_RL = "Megatron", "NeMo", "NeMo RL"


@dataclass
class BlockSave:
    """A sample that one line or block told completely.

    Attributes:
        seconds: maximum across ranks.
        least: minimum across ranks, None if the log does not tell.
        values: all numbers of it, in seconds.
        ranks: number of ranks that it lists, None if it lists none.
        attempt: start of the job that it belongs to, from 0.
        fine: whether they are exact enough to tell two saves apart.
    """

    timer: str
    step: int | None
    order: int
    seconds: float
    least: float | None
    values: tuple[float, ...]
    fine: bool
    ranks: int | None = None
    attempt: int = 0


@dataclass
class JobFacts:
    """What tells one job's log from another's.

    Attributes:
        frameworks: whose timing lines were seen.
        parameters: parameters on the first model-parallel rank, of every model that the log names.
        world_size: number of ranks, as often as the log names it.
        arms: arms of ``mlflashpoint ab`` that wrote the log.
        runs: job ids that it gave those runs.
        resumed_from: training steps that the log says it went on from.
        saves_told: saves that the log says have gone well, timed or not.
    """

    frameworks: set[str] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    world_size: set[int] = field(default_factory=set)
    arms: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    resumed_from: list[int] = field(default_factory=list)
    saves_told: int = 0


class TimerChoice:
    """Which timers of a framework's blocks are kept: all that have to do with checkpoints, or those that match.

    Args:
        patterns: shell patterns of timer names; empty for the checkpoint timers.

    Attributes:
        patterns: the same.
        refused: timers that match none of them, as many as can be told.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self.refused: set[str] = set()

    def __call__(self, timer: str) -> bool:
        if self.patterns:
            matches = any(fnmatch.fnmatchcase(timer, pattern) for pattern in self.patterns)
            if not matches and len(self.refused) < _MOST_REFUSED:
                self.refused.add(timer)
            return matches
        lowered = timer.lower()
        return "checkpoint" in lowered or "ckpt" in lowered


class LogScan:
    """Feed it a log's lines in order, then ``finish``.

    Attributes:
        collapsed: our save records that Ray left out of the log.
        last: timer and seconds of the line that was understood last.
        choice: which timers are kept.
        unread: lines that name a block of timers, and are none that begins one.
    """

    def __init__(self, choice: TimerChoice | None = None) -> None:
        self.collapsed = 0
        self.unread = 0
        self.facts = JobFacts()
        self.ranked = RankedSaves()
        self.block_saves: list[BlockSave] = []
        self.choice = choice or TimerChoice()
        self._clock = StepClock()
        self._attempts = Attempts()
        self._blocks = blocks.TimerBlocks(self._clock, self.choice)
        self._filter = RowFilter()
        self.last: tuple[str, float] | None = None
        self._torn_records = 0
        self._order = 0

    @property
    def torn(self) -> int:
        """Pieces of timing lines that could not be used."""
        return self._torn_records + self._blocks.torn

    @property
    def duplicates(self) -> int:
        return self._filter.duplicates + self.ranked.duplicates

    @property
    def samples(self) -> int:
        return len(self.block_saves) + sum(1 for _ in self.ranked.items())

    @property
    def total_steps(self) -> int | None:
        """How long the training is to be, as the log tells it last."""
        return self._clock.total

    def fingerprint(self) -> Iterator[object]:
        """One value per timing that is fine enough to be no coincidence, equal for the same one in another log."""
        yield from self.ranked.identities()
        for save in self.block_saves:
            if save.fine:
                yield save.timer, save.values

    def series(self) -> Series:
        """The saves that another log can hold too; those in coarse steps can't be told apart."""
        told = [(save.order, Told(save.timer, save.step, save.values)) for save in self.block_saves if save.fine]
        told += [(save.order, Told(timer, save.step, save.first_told)) for timer, save in self.ranked.items()]
        return Series([save for _, save in sorted(told, key=lambda pair: pair[0])])

    def feed(self, lines: Iterable[bytes]) -> None:
        """Take the next lines; those without any of ``WORDS`` can be left out."""
        for raw in lines:
            for line in prefix.lines(raw):
                self._line(line)

    def finish(self) -> None:
        """The log has ended."""
        for row in self._blocks.finish():
            self._row(row, MEGATRON)

    def _line(self, line: prefix.Line) -> None:
        stream, text, repeated = line
        back = self._clock.feed(stream, text)
        if back is not None:
            self._attempts.stepped(text, back)
        for row in self._blocks.feed(stream, text):
            self._row(row, MEGATRON)
        self.unread += "across ranks (" in text and text[-1:] != ":"
        # several of these can stand on one line, if a line end was lost
        if "mlflashpoint " in text:
            self._own(text, repeated)
        if "Global Checkpoint " in text:
            self._nemo(text)
        if "• " in text:
            self._nemo_rl(stream, text)
        if "number of parameters on " in text and (match := _PARAMETERS.search(text)):
            self.facts.parameters.add(int(match[1]))
        if "using world size" in text and (match := _WORLD_SIZE.search(text)):
            self.facts.world_size.add(int(match[1]))
        if "uccessfully saved " in text:
            self.facts.saves_told += _SAVED.search(text) is not None
        if "successfully loaded checkpoint" in text and (match := _RESUMED.search(text)):
            step = int(match[1])
            if self.facts.resumed_from[-1:] != [step]:
                self.facts.resumed_from.append(step)
            self._attempts.resumed(step)

    def _nemo(self, text: str) -> None:
        for record in records.nemo_records(text):
            if isinstance(record, records.Torn):
                self._torn(record)
                continue
            self._record(record)
            self.facts.frameworks.add(NEMO)

    def _nemo_rl(self, stream: str, text: str) -> None:
        for row in records.nemo_rl_rows(text):
            if isinstance(row, records.Torn):
                self._torn_records += self.choice(row.timer)
                continue
            self._row(blocks.Row(stream, row[0], (row[1],), self._clock.moment(stream)), NEMO_RL)

    def _own(self, text: str, repeated: int) -> None:
        for record in records.own_records(text):
            if isinstance(record, records.Torn):
                self._torn(record)
            elif isinstance(record, records.RankRecord):
                self._record(record)
                self.collapsed += repeated
            else:
                self._announcement(record)

    def _announcement(self, fields: Mapping[str, Any]) -> None:
        if isinstance(arm := fields.get("arm"), str):
            self.facts.arms.add(arm)
        if isinstance(run := fields.get("run"), str):
            self.facts.runs.add(run)

    def _record(self, record: records.RankRecord) -> None:
        save = self.ranked.add(record, self._order, self._attempts)
        if save is not None and save.order == self._order:
            self._order += 1
        self.last = record.timer, record.seconds

    def _torn(self, record: records.Torn) -> None:
        self._torn_records += 1
        self.ranked.tear(record)

    def _row(self, row: blocks.Row, framework: str) -> None:
        self.facts.frameworks.add(framework)
        if not self.choice(row.timer) or self._filter.is_copy(row):
            return
        saves = "load" not in row.timer
        step = self._clock.step_of_save(row.moment) if saves else None
        if framework == MEGATRON and self._filter.is_known(row, step):
            return
        least = None if len(row.values) == 1 else min(row.values)
        sample = BlockSave(
            row.timer,
            step,
            self._order,
            max(row.values),
            least,
            row.values,
            framework == MEGATRON,
            row.ranks,
            self._attempts.block(row.timer, step),
        )
        self.block_saves.append(sample)
        self.last = sample.timer, sample.seconds
        self._order += 1
