"""Whether all ranks save one step to one store, told with their plans; the coordinator sees all before any writes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from mlflashpoint.adapter.pytorch.going_back import decided
from mlflashpoint.core.ranks import named
from mlflashpoint.core.visits import Back
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
        back: which older version it has loaded since it saved that step; None if it has not, on either count.
        moved: whether it lies in another base container than the last one of this rank. The containers themselves can't
            be compared, for nodes may have them in different places.
    """

    number: int
    step: int
    version: str
    moved: bool
    back: Back | None


@dataclass(frozen=True)
class _GoBack:
    """The coordinator's word, on the plan that a rank gets back.

    Attributes:
        number: of the rank's mark: a planner may keep this too.
        step: where all ranks go back to.
    """

    number: int
    step: int


def marked(plan: SavePlan, step: int, version: str, container: str, back: Back | None) -> tuple[SavePlan, int]:
    """The plan, marked, unless the planner keeps something of its own in that place; and the number of the mark."""
    number = next(_numbers)
    if plan.storage_data is None or isinstance(plan.storage_data, (_Mark, _GoBack)):
        mark = _Mark(number, step, version, container != _container, back)
        plan = dataclasses.replace(plan, storage_data=mark)
    return plan, number


def goes_back(plan: SavePlan, number: int) -> int | None:
    """Where all ranks go back to before they make the save of that mark, as its final plan says; None for nowhere."""
    word = plan.storage_data
    return word.step if isinstance(word, _GoBack) and word.number == number else None


def saved_to(container: str) -> None:
    """All ranks were of one mind, and this one writes."""
    global _container
    _container = container


def compared(plans: Sequence[SavePlan], *, world_size: int) -> list[SavePlan]:
    """The plans without their marks, which are compared: on the coordinator, in the order of the ranks.

    A rank whose planner has kept its plan from an earlier save has no mark, and is not asked.

    Args:
        plans: of the ranks that save together.
        world_size: of the store.

    Raises:
        StepError: the ranks save different steps, or some of them to another container; names the version of each.
            Or it can't be told whether all of them go back to one version.
    """
    marks: dict[int, _Mark] = {}
    for rank, plan in enumerate(plans):
        mark = plan.storage_data
        if isinstance(mark, _Mark) and mark.number > _seen.get(rank, 0):
            _seen[rank] = mark.number
            marks[rank] = mark
    steps = {mark.step for mark in marks.values()}
    if len({(mark.step, mark.moved) for mark in marks.values()}) < 2:
        backs = {rank: mark.back for rank, mark in marks.items()}
        to = decided(backs, next(iter(steps), 0), ranks=len(plans), world_size=world_size)
        words = {rank: None if to is None else _GoBack(mark.number, to) for rank, mark in marks.items()}
        return [
            dataclasses.replace(plan, storage_data=words.get(rank))
            if isinstance(plan.storage_data, (_Mark, _GoBack))
            else plan
            for rank, plan in enumerate(plans)
        ]
    of: dict[str, list[int]] = {}
    for rank, mark in marks.items():
        of.setdefault(mark.version, []).append(rank)
    told = "; ".join(f"{version}: {named(ranks, _NAMED)}" for version, ranks in list(of.items())[:_NAMED])
    raise StepError(
        f"the ranks save different steps ({told})" if len(steps) > 1 else f"some ranks save elsewhere ({told})",
        remedy="nothing was saved; pass the same checkpoint_id on all ranks",
    )
