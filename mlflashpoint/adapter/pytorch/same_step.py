"""Whether all ranks save one step, told with their plans: the coordinator sees them all before anybody writes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from mlflashpoint.errors import StepError

#: ranks that an error names
_NAMED = 4


@dataclass(frozen=True)
class _Mark:
    """What a rank is about to save.

    Attributes:
        number: of the save among those of this rank's writer: a planner may keep a plan, and the mark on it, from an
            earlier save.
        step: training step.
        version: the checkpoint's id.
    """

    number: int
    step: int
    version: str


class SameStep:
    """Marks this rank's plans and, on the coordinator, compares the marks of all."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._seen: dict[int, _Mark] = {}

    def mark(self, plan: SavePlan, step: int, version: str) -> SavePlan:
        """The plan, marked, unless the planner keeps something of its own in that place."""
        if plan.storage_data is not None and not isinstance(plan.storage_data, _Mark):
            return plan
        return dataclasses.replace(plan, storage_data=_Mark(next(self._numbers), step, version))

    def check(self, plans: Sequence[SavePlan]) -> None:
        """Compare the marks of the plans, which are in the order of the ranks.

        Raises:
            StepError: the ranks save different steps; names the version of each.
        """
        marks: dict[int, _Mark] = {}
        for rank, plan in enumerate(plans):
            mark = plan.storage_data
            if isinstance(mark, _Mark) and self._seen.get(rank) != mark:
                self._seen[rank] = marks[rank] = mark
        if len({mark.step for mark in marks.values()}) < 2:
            return
        of: dict[str, list[int]] = {}
        for rank, mark in marks.items():
            of.setdefault(mark.version, []).append(rank)
        told = "; ".join(
            f"{version}: {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:_NAMED]))}"
            f"{f' and {len(ranks) - _NAMED} more' if len(ranks) > _NAMED else ''}"
            for version, ranks in list(of.items())[:_NAMED]
        )
        raise StepError(
            f"the ranks save different steps ({told})",
            remedy="nothing was saved; pass the same checkpoint_id on all ranks",
        )
