"""One sample per save, though several ranks log it."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from mlflashpoint.timings.attempts import Attempts
from mlflashpoint.timings.records import TIMED, RankRecord, Torn

#: ranks of one save can't begin it further apart: their collectives would have timed out
_LATEST_S = 600.0
#: clocks of two nodes may differ by more than lies between two checkpoints of one step
_CLOCKS_S = 5.0
#: stands for the record of a rank that was torn; no record has it as its identity
_TORN = math.inf


@dataclass
class RankedSave:
    """One save as its ranks told it; slowest rank's seconds, since all ranks wait for the slowest.

    Attributes:
        seconds: maximum over the ranks seen.
        step: training step, None if unknown.
        ok: every rank seen said that it went well.
        skipped: some rank left it out.
        order: place of its first line in the log.
        attempt: start of the job that it belongs to, from 0.
        doubtful: a torn record, whose rank can't be read, may have been of this save.
        told: a rank has told of it; one that only torn records tell of is no save.
    """

    step: int | None
    order: int
    attempt: int = 0
    seconds: float = 0.0
    ok: bool = True
    skipped: bool = False
    doubtful: bool = False
    told: bool = False
    identities: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ranks(self) -> set[int]:
        """Ranks whose record is here."""
        return {rank for rank, identity in enumerate(self.identities) if math.isfinite(identity)}

    @property
    def torn(self) -> set[int]:
        """Ranks whose record was torn."""
        return {rank for rank, identity in enumerate(self.identities) if identity == _TORN}

    @property
    def first_told(self) -> tuple[int, float]:
        """The first rank and the identity of its line, by which the save is known in another log."""
        return next((rank, value) for rank, value in enumerate(self.identities) if math.isfinite(value))

    def takes(self, rank: int, identity: float) -> bool | None:
        """Whether a rank's record belongs here (True), is here already (None), or is of another save (False)."""
        if rank >= len(self.identities) or math.isnan(self.identities[rank]):
            return True
        return None if self.identities[rank] == identity else False

    def put(self, rank: int, identity: float) -> None:
        missing = rank + 1 - len(self.identities)
        if missing > 0:
            self.identities.extend([math.nan] * missing)
        self.identities[rank] = identity

    def add(self, record: RankRecord) -> None:
        self.put(record.rank, record.identity)
        self.seconds = max(self.seconds, record.seconds)
        self.step = record.step
        self.ok = self.ok and record.ok
        self.skipped = self.skipped or record.skipped
        self.told = True

    def absorb(self, other: RankedSave) -> None:
        """Take over the ranks that another file of the same run holds."""
        for rank, identity in enumerate(other.identities):
            if not math.isnan(identity) and self.takes(rank, identity):
                self.put(rank, identity)
        self.seconds = max(self.seconds, other.seconds)
        self.step = other.step if self.step is None else self.step
        self.ok, self.skipped = self.ok and other.ok, self.skipped or other.skipped
        self.doubtful, self.told = self.doubtful or other.doubtful, self.told or other.told


class RankedSaves:
    """The saves of one run of a job that are told rank by rank.

    Attributes:
        duplicates: records that were seen before.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self._saves: dict[tuple[str, tuple[object, ...]], list[RankedSave]] = {}
        #: the save of each timer that was told of last, the newest at the end
        self._newest: dict[str, RankedSave] = {}
        #: ranks by timer whose record was torn, of whatever save
        self._torn_ranks: dict[str, set[int]] = {}
        #: what the timers' names begin with, and how many torn records of unknown ranks there were
        self._nameless: Counter[str] = Counter()
        self._doubts: set[str] = set()

    def add(self, record: RankRecord, order: int, attempts: Attempts) -> RankedSave | None:
        """Returns the save that the record belongs to; None if it was seen before."""
        saves = self._saves.setdefault((record.timer, record.key), [])
        save = self._place(saves, record.rank, record.identity)
        if save is None:
            self.duplicates += 1
            return None
        attempt = attempts.record(record, new=not save.told)
        if attempt is not None:
            save.attempt = attempt
        if not save.told:
            save.order = order
        save.add(record)
        self._newest.pop(record.timer, None)
        self._newest[record.timer] = save
        for family in [family for family in self._doubts if record.timer.startswith(family)]:
            save.doubtful = True
            self._doubts.remove(family)
        return save

    def tear(self, torn: Torn) -> None:
        """A record is not whole: the save that it was of has no maximum that is known."""
        if torn.rank is not None:
            if torn.key is None:
                self._torn_ranks.setdefault(torn.timer, set()).add(torn.rank)
            elif save := self._place(self._saves.setdefault((torn.timer, torn.key), []), torn.rank, _TORN):
                save.put(torn.rank, _TORN)
            return
        self._nameless[torn.timer] += 1
        if torn.key is not None:
            saves = self._saves.setdefault((torn.timer, torn.key), [])
            saves[-1:] = saves[-1:] or [RankedSave(None, 0)]
            saves[-1].doubtful = True
            return
        # it stood between two records: it was of the save of either
        for timer in reversed(self._newest):
            if timer.startswith(torn.timer):
                self._newest[timer].doubtful = True
                break
        self._doubts.add(torn.timer)

    def whole(self, world_sizes: Collection[int]) -> Iterator[tuple[str, RankedSave, bool]]:
        """Every save, and whether it is known from all ranks that tell of saves of its timer at all.

        Args:
            world_sizes: numbers of ranks that the log names.
        """
        groups: dict[tuple[str, int], list[tuple[RankedSave, set[int]]]] = {}
        for timer, save in self.items():
            groups.setdefault((timer, save.attempt), []).append((save, save.ranks))
        lost = self._lost_ranks()
        for (timer, _), saves in groups.items():
            unseen = (ranks for family, ranks in lost.items() if timer.startswith(family))
            everyone = set[int]().union(*(ranks | save.torn for save, ranks in saves), *unseen)
            missing = sum(len(everyone) - len(ranks) for _, ranks in saves)
            nameless = sum(count for family, count in self._nameless.items() if timer.startswith(family))
            # torn records of unknown ranks can be of a rank that is never seen, unless
            certain = (
                missing >= nameless  # they are those that are missing anyway
                or len(everyone) == 1  # the log is one rank's
                or len(everyone) in world_sizes  # there is no further rank
                # other saves have no more ranks
                or any(not save.doubtful and ranks == everyone for save, ranks in saves)
            )
            for save, ranks in saves:
                yield timer, save, ranks == everyone and (certain or not save.doubtful)

    def _lost_ranks(self) -> dict[str, set[int]]:
        """Ranks of which nothing but torn records is there, by what the names of their timers begin with."""
        return {
            family: ranks.difference(*(save.ranks for timer, save in self.items() if timer.startswith(family)))
            for family, ranks in self._torn_ranks.items()
        }

    def items(self) -> Iterator[tuple[str, RankedSave]]:
        for (timer, _), saves in self._saves.items():
            for save in saves:
                if save.told:
                    yield timer, save

    def completes(self, other: RankedSaves) -> bool:
        """Whether both hold ranks of the same run: common saves, no rank twice in any of them, none at other times."""
        pairs = self._pairs(other)
        return bool(pairs) and self._apart(pairs) and self._at_once(pairs)

    def contradicts(self, other: RankedSaves) -> bool:
        """Whether both hold different ranks of the same steps, but of two runs: the saves began at other times."""
        pairs = self._pairs(other)
        return bool(pairs) and self._apart(pairs) and not self._at_once(pairs)

    def _pairs(self, other: RankedSaves) -> list[tuple[str, RankedSave, RankedSave]]:
        return [
            (key[0], mine, theirs)
            for key in self._saves.keys() & other._saves.keys()
            for mine, theirs in zip(self._saves[key], other._saves[key], strict=False)
            if mine.told and theirs.told
        ]

    @staticmethod
    def _apart(pairs: list[tuple[str, RankedSave, RankedSave]]) -> bool:
        return all(mine.ranks.isdisjoint(theirs.ranks) for _, mine, theirs in pairs)

    @staticmethod
    def _at_once(pairs: list[tuple[str, RankedSave, RankedSave]]) -> bool:
        """No rank can begin a save before another one has begun the save before it: a save is all ranks' work."""
        begun: dict[str, list[tuple[float, float]]] = {}
        for timer, mine, theirs in pairs:
            if timer.startswith(TIMED):
                begun.setdefault(timer, []).append((mine.first_told[1], theirs.first_told[1]))
        for times in begun.values():
            times.sort()
            if any(abs(one - other) > _LATEST_S for one, other in times):
                return False
            if any(max(this) > min(following) + _CLOCKS_S for this, following in pairwise(times)):
                return False
        return True

    def absorb(self, other: RankedSaves) -> None:
        for key, saves in other._saves.items():
            mine = self._saves.setdefault(key, [])
            for index, save in enumerate(saves):
                if index < len(mine):
                    mine[index].absorb(save)
                else:
                    mine.append(save)
        for timer, ranks in other._torn_ranks.items():
            self._torn_ranks.setdefault(timer, set()).update(ranks)
        self._nameless += other._nameless

    def identities(self) -> Iterator[object]:
        """One value per line that was kept, equal for the same line of another file."""
        for key, saves in self._saves.items():
            for save in saves:
                for rank in save.ranks:
                    yield (*key, rank, save.identities[rank])

    def _place(self, saves: list[RankedSave], rank: int, identity: float) -> RankedSave | None:
        """Which of the ``saves`` of one key a rank's record belongs to; None if it is there already."""
        for save in saves:
            takes = save.takes(rank, identity)
            if takes is None:
                return None
            if takes:
                return save
        saves.append(RankedSave(None, 0))
        return saves[-1]
