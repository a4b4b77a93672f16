"""Whether a save of a step that lies in memory already goes back, for all ranks or for none.

A job goes back by loading an older version and going on from there. A rank alone may load one too, to compare it. The
loads of one rank can't tell the two apart, those of all ranks can.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.core.visits import VISITS, Back, Visit
from mlflashpoint.errors import StepError

Seen = Mapping[tuple[str, str], tuple[Visit, ...]]

log = logging.getLogger("mlflashpoint.adapter")

#: what helps where the ranks do not all go back to one version
REMEDY = (
    "to go back, load the older version whole on all ranks, or call store.runtime.resumed(step) on "
    "all of them; otherwise save under another step"
)
#: ranks that an error names
_NAMED = 4


class GoingBack:
    """What one writer knows of it, from save to save.

    Args:
        staged: what was loaded before the state of the next save was taken; None if that is taken when it begins.
    """

    def __init__(self, staged: Seen | None = None) -> None:
        self._staged = staged
        self._seen: Seen = {}
        self._back: Back | None = None

    def state_taken(self) -> None:
        """The next save has its state; what is loaded from now on comes after it."""
        self._staged = VISITS.seen()

    def take_staged(self) -> Seen:
        """What the next save knows of, plain data, for the process that makes it."""
        seen, self._staged = VISITS.seen() if self._staged is None else self._staged, None
        return seen

    def begin(self) -> None:
        """A save begins."""
        self._seen, self._back = self.take_staged(), None

    def bring(self, runtime: Runtime, step: int) -> Back | None:
        """What this rank brings to the save; None if it is of no step saved before, or nothing older was loaded."""
        if runtime.saved_step == step:
            self._back = VISITS.back(
                _place(runtime), step, self._seen, rank=runtime.rank, world_size=runtime.world_size
            )
        return self._back

    def bring_whole(self, runtime: Runtime, step: int) -> Back | None:
        """A save begins, and what this rank brings to it; raises StepError if that is not one version, whole."""
        self.begin()
        back = self.bring(runtime, step)
        if back is not None and back.step is None:
            raise refusal(step, [(runtime.rank, back)])
        return back

    def follow(self, runtime: Runtime, step: int, to: int | None) -> None:
        """Go back to ``to``, as all ranks do; raises StepError if this one should and was not told."""
        back, self._back = self._back, None
        if to is not None:
            log.info("a save of step %d again: training went back to step %d, newer versions do not count", step, to)
            runtime.resumed(to)
            self.settled(runtime)
        elif back is not None:
            raise refusal(step, [(runtime.rank, back)])

    def settled(self, runtime: Runtime) -> None:
        """The save was made: the next one does not come from what was loaded before this one."""
        VISITS.settle(_place(runtime), self._seen)


def decided(backs: Mapping[int, Back | None], step: int, *, ranks: int, world_size: int) -> int | None:
    """Where all ranks go back to, before a save of ``step``; None for nowhere.

    Args:
        backs: of the ranks that were asked.
        step: what they save.
        ranks: how many save together.
        world_size: how many the store has.

    Raises:
        StepError: only some of them may go back, or not all to one version.
    """
    known = set(backs.values())
    if known <= {None}:
        return None
    found = known.pop() if len(known) == 1 else None
    if found is not None and found.step is not None and len(backs) == ranks == world_size:
        return found.step
    raise refusal(step, [(rank, back) for rank, back in sorted(backs.items())])


def refusal(step: int, backs: Sequence[tuple[int, Back | None]]) -> StepError:
    """That it can't be told whether the job goes back."""
    told = ", ".join(f"rank {rank}: {'nothing' if back is None else back}" for rank, back in backs[:_NAMED])
    more = f" and {len(backs) - _NAMED} more ranks" if len(backs) > _NAMED else ""
    return StepError(
        f"step {step} was saved already, and older versions were loaded since ({told}{more}): it can't be told whether "
        "the job goes back",
        step=step,
        remedy=REMEDY,
    )


def _place(runtime: Runtime) -> tuple[str, str]:
    return runtime.group, str(CheckpointContainerId(str(runtime.config.base_container)))
