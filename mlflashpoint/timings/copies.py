"""Whether two logs hold the same saves, all or some of them, and what to think of that."""

from __future__ import annotations

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.scan import LogScan


class ToldSaves:
    """What a log holds, to find out whether another one holds it too."""

    def __init__(self, path: str, scan: LogScan, digest: bytes) -> None:
        self.path = path
        self._runs = scan.facts.runs
        self._all = frozenset(scan.fingerprint())
        self._series = scan.series()
        self._digest = digest

    def repeats(self, other: ToldSaves) -> list[str]:
        """Refuses what is in both logs for certain, and returns a note on what may be."""
        if self._runs and other._runs and self._runs.isdisjoint(other._runs):
            return []
        equal, least = self._digest == other._digest, min(len(self._all), len(other._all))
        repeated = least > 0 and (self._all <= other._all or other._all <= self._all)
        # a few equal numbers can be chance, and so can equal files of times in steps of 10 ms
        if repeated and (equal or least >= 3):
            raise TimingsError(
                f"every timing of one of {self.path} and {other.path} is in the other one too",
                remedy="give one of the two: the same saves would count twice",
            )
        if repeated or equal:
            return [
                f"every timing of one of {self.path} and {other.path} is in the other one too: "
                "if one is a copy of the other, its saves count twice"
            ]
        overlap = self._series.overlap(other._series)
        if overlap.sure:
            raise TimingsError(
                f"{self.path} and {other.path} have {overlap.saves} saves in common, equal to the last digit",
                remedy="they would count twice; if the logs are pieces of one run, join them: "
                "'cat LOG LOG | mlflashpoint timings parse ... -' counts each save once",
            )
        if overlap.saves:
            return [
                f"{overlap.saves} of the saves in {self.path} and {other.path} are equal to the last digit: "
                "if the logs are of one run, they count twice"
            ]
        return []
