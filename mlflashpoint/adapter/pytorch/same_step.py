"""Whether all ranks save one step to one store, told with their plans; the coordinator sees all before any writes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from mlflashpoint.errors import StepError

#: ranks that an error names
_NAMED = 4
#: of this process's saves, whichever writer makes them: a checkpoint process has a new one for each
_numbers = itertools.count(1)
#: the newest mark of each rank that the coordinator has seen
_seen: dict[int, int] = {}
#: base container that this process has saved to last; empty for none yet
_container = ""


@dataclass(frozen=True)
class _Mark:
    """What a rank is about to save.

    Attributes:
        number: of the save among those of this process: a planner may keep a plan, and the mark on it, from an
            earlier save.
        step: training step.
        version: the checkpoint's id.
        moved: whether it lies in another base container than the last one of this rank. The containers themselves can't
            be compared, for nodes may have them in different places.
    """

    number: int
    step: int
    version: str
    moved: bool


def marked(plan: SavePlan, step: int, version: str, container: str) -> SavePlan:
    """The plan, marked, unless the planner keeps something of its own in that place."""
    if plan.storage_data is not None and not isinstance(plan.storage_data, _Mark):
        return plan
    return dataclasses.replace(plan, storage_data=_Mark(next(_numbers), step, version, container != _container))


def saved_to(container: str) -> None:
    """All ranks were of one mind, and this one writes."""
    global _container
    _container = container


def compared(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans without their marks, which are compared: on the coordinator, in the order of the ranks.

    A rank whose planner has kept its plan from an earlier save has no mark, and is not asked.

    Raises:
        StepError: the ranks save different steps, or some of them to another container; names the version of each.
    """
    marks: dict[int, _Mark] = {}
    for rank, plan in enumerate(plans):
        mark = plan.storage_data
        if isinstance(mark, _Mark) and mark.number > _seen.get(rank, 0):
            _seen[rank] = mark.number
            marks[rank] = mark
    steps = {mark.step for mark in marks.values()}
    if len({(mark.step, mark.moved) for mark in marks.values()}) < 2:
        return [dataclasses.replace(p, storage_data=None) if isinstance(p.storage_data, _Mark) else p for p in plans]
    of: dict[str, list[int]] = {}
    for rank, mark in marks.items():
        of.setdefault(mark.version, []).append(rank)
    told = "; ".join(
        f"{version}: {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:_NAMED]))}"
        f"{f' and {len(ranks) - _NAMED} more' if len(ranks) > _NAMED else ''}"
        for version, ranks in list(of.items())[:_NAMED]
    )
    raise StepError(
        f"the ranks save different steps ({told})" if len(steps) > 1 else f"some ranks save elsewhere ({told})",
        remedy="nothing was saved; pass the same checkpoint_id on all ranks",
    )
