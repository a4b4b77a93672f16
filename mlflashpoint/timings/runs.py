"""The samples of one run, and the saves that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from mlflashpoint.timings.samples import Sample
from mlflashpoint.timings.scan import LogScan


@dataclass
class Lost:
    """Saves that are no samples, by timer.

    Attributes:
        failed: they went wrong on some rank.
        skipped: they were left out on some rank.
        partial: some rank's time is not known.
    """

    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    partial: Counter[str] = field(default_factory=Counter)

    def notes(self) -> list[str]:
        return [
            *(f"{timer}: {count} saves failed on some rank and are left out" for timer, count in self.failed.items()),
            *(f"{timer}: {count} saves were skipped and are left out" for timer, count in self.skipped.items()),
            *(
                f"{timer}: {count} saves are left out: a rank's timing of them is torn or missing, "
                "so their maximum across ranks is not known"
                for timer, count in self.partial.items()
            ),
        ]


def run_samples(run: LogScan, world_sizes: Collection[int], lost: Lost) -> list[tuple[str, Sample]]:
    """Every save of a run whose maximum across ranks is known, with its timer.

    Args:
        run: all logs of the run.
        world_sizes: numbers of ranks that logs of the label name.
        lost: takes up the saves that are no samples.

    Returns:
        Samples whose ``run`` is the attempt that they belong to.
    """
    samples = []
    listed: Counter[tuple[str, int]] = Counter()
    for block in run.block_saves:
        key = block.timer, block.attempt
        listed[key] = max(listed[key], block.ranks or 0)
    for block in run.block_saves:
        if block.ranks is not None and block.ranks < listed[block.timer, block.attempt]:
            lost.partial[block.timer] += 1
            continue
        least = None if block.least is None else round(block.least, 9)
        samples.append((block.timer, Sample(round(block.seconds, 9), block.attempt, block.order, block.step, least)))
    for timer, save, whole in run.ranked.whole(world_sizes):
        if save.skipped or not save.ok or not whole:
            (lost.skipped if save.skipped else lost.partial if save.ok else lost.failed)[timer] += 1
            continue
        sample = Sample(round(save.seconds, 9), save.attempt, save.order, save.step, ranks=len(save.ranks))
        samples.append((timer, sample))
    return samples
