"""One sample per save, though several ranks log it and a log can hold the same line several times."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mlflashpoint.timings.blocks import Row
from mlflashpoint.timings.records import RankRecord

#: how far one copy of a log's lines may lag behind another, in saves of one timer
_LAG = 64


@dataclass
class RankedSave:
    """One save as its ranks told it; slowest rank's seconds, since all ranks wait for the slowest.

    Attributes:
        seconds: maximum over the ranks seen.
        step: training step, None if unknown.
        ok: every rank seen said that it went well.
        skipped: some rank left it out.
        order: place of its first line in the log.
    """

    step: int | None
    order: int
    seconds: float = 0.0
    ok: bool = True
    skipped: bool = False
    identities: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, identity in enumerate(self.identities) if not math.isnan(identity)}

    @property
    def first_told(self) -> tuple[int, float]:
        """The first rank and the identity of its line, by which the save is known in another log."""
        return next((rank, value) for rank, value in enumerate(self.identities) if not math.isnan(value))

    def takes(self, record: RankRecord) -> bool | None:
        """Whether ``record`` belongs here (True), is here already (None), or belongs to another save (False)."""
        if record.rank >= len(self.identities) or math.isnan(self.identities[record.rank]):
            return True
        return None if self.identities[record.rank] == record.identity else False

    def add(self, record: RankRecord) -> None:
        missing = record.rank + 1 - len(self.identities)
        if missing > 0:
            self.identities.extend([math.nan] * missing)
        self.identities[record.rank] = record.identity
        self.seconds = max(self.seconds, record.seconds)
        self.ok = self.ok and record.ok
        self.skipped = self.skipped or record.skipped

    def absorb(self, other: RankedSave) -> None:
        """Take over the ranks that another file of the same run holds."""
        longer = max(len(self.identities), len(other.identities))
        for save in (self, other):
            save.identities.extend([math.nan] * (longer - len(save.identities)))
        for rank, identity in enumerate(other.identities):
            if not math.isnan(identity):
                self.identities[rank] = identity
        self.seconds = max(self.seconds, other.seconds)
        self.ok, self.skipped = self.ok and other.ok, self.skipped or other.skipped


class RankedSaves:
    """The saves of one run of a job that are told rank by rank.

    Attributes:
        duplicates: records that were seen before.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self._saves: dict[tuple[str, tuple[object, ...]], list[RankedSave]] = {}

    def add(self, record: RankRecord, order: int) -> bool:
        """Returns whether the record begins a save that no rank has told of before."""
        saves = self._saves.setdefault((record.timer, record.key), [])
        for save in saves:
            takes = save.takes(record)
            if takes is None:
                self.duplicates += 1
                return False
            if takes:
                save.add(record)
                return False
        save = RankedSave(record.step, order)
        save.add(record)
        saves.append(save)
        return True

    def items(self) -> Iterator[tuple[str, RankedSave]]:
        for (timer, _), saves in self._saves.items():
            for save in saves:
                yield timer, save

    def completes(self, other: RankedSaves) -> bool:
        """Whether both hold ranks of the same run: common saves, and no rank twice in any of them."""
        common = self._saves.keys() & other._saves.keys()
        return bool(common) and all(
            mine.ranks.isdisjoint(theirs.ranks)
            for key in common
            for mine, theirs in zip(self._saves[key], other._saves[key], strict=False)
        )

    def absorb(self, other: RankedSaves) -> None:
        for key, saves in other._saves.items():
            mine = self._saves.setdefault(key, [])
            for index, save in enumerate(saves):
                if index < len(mine):
                    mine[index].absorb(save)
                else:
                    mine.append(save)

    def identities(self) -> Iterator[object]:
        """One value per line that was kept, equal for the same line of another file."""
        for key, saves in self._saves.items():
            for save in saves:
                for rank in save.ranks:
                    yield (*key, rank, save.identities[rank])


@dataclass
class _Seen:
    values: tuple[float, ...]
    streams: set[str]
    epoch: int


class RowFilter:
    """Tells a save that is logged a second time (through tee, two collectors, a repeated line) from a second save.

    The same numbers, to the last digit, are the same save
    - from another writer, if that one has not shown them yet: a copy of the log, with another prefix or none;
    - from the same writer, while the training has not gone on in between;
    - for the same training step, if the numbers are fine enough to tell two saves apart.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self._recent: dict[str, deque[_Seen]] = {}
        self._known: set[tuple[str, int, tuple[float, ...]]] = set()

    def is_copy(self, row: Row) -> bool:
        """Whether ``row`` repeats one before it."""
        epoch = row.moment.epoch
        recent = self._recent.setdefault(row.timer, deque(maxlen=_LAG))
        for seen in recent:
            if seen.values == row.values and (row.stream not in seen.streams or seen.epoch == epoch):
                seen.streams.add(row.stream)
                self.duplicates += 1
                return True
        recent.append(_Seen(row.values, {row.stream}, epoch))
        return False

    def is_known(self, row: Row, step: int | None) -> bool:
        """Whether the same step has shown the same numbers before."""
        if step is None:
            return False
        key = row.timer, step, row.values
        if key in self._known:
            self.duplicates += 1
            return True
        self._known.add(key)
        return False
