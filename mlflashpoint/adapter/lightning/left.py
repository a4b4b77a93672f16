"""Due steps that are left to the recipe's own checkpoints, and whether a restart would ever look at those files."""

from __future__ import annotations

import logging
import weakref
from typing import Any

_log = logging.getLogger(__name__)

#: Trainers whose fit is told what to go on from, also where nothing has that name yet
_naming: weakref.WeakSet[Any] = weakref.WeakSet()
#: whether NeMo's AutoResume looks for checkpoints in this process; it does so before it has to do with a Trainer
_auto_resume = False


def named(trainer: Any, found: bool) -> None:
    """The Trainer's next fit names a checkpoint to go on from, or none."""
    (_naming.add if found else _naming.discard)(trainer)


def auto_resume_looks() -> None:
    global _auto_resume
    _auto_resume = True


class LeftSteps:
    """Those of one fit; to be told of each due step, on every rank."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._told = False

    def in_memory(self) -> None:
        """Memory has the newest step."""
        self._before = None

    def left(self, trainer: Any, step: int) -> None:
        """``step`` is left to the recipe. One alone is an interval; where two in a row are, it may be all of them."""
        before, self._before = self._before, step
        if before is None or self._told or _auto_resume or trainer in _naming:
            return
        self._told = True
        if trainer.is_global_zero:
            _log.warning(
                "steps %d and %d were left to the recipe's own checkpoints, and memory holds nothing as new. This fit "
                "has no ckpt_path, and without one a restart does not look at those files. Give fit a ckpt_path "
                '(ckpt_path="last" for a ModelCheckpoint with save_last=True), or set '
                "MLFLASHPOINT_SKIP_DURABLE_STEPS=0 to save such steps to memory too",
                before,
                step,
            )
