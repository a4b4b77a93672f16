"""What a Megatron loop asks when it decides whether to resume: is there a version in memory, and of which step."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.megatron_local import durable, tensor_aware
from mlflashpoint.core.runtime import Recovery, Runtime
from mlflashpoint.core.runtimes import get_runtime
from mlflashpoint.errors import FlashpointError

log = logging.getLogger("mlflashpoint.adapter.megatron")


class LocalCheckpointIndex:
    """The newest version that the memory store can give back to all ranks.

    Args:
        checkpoint_config: the loop's settings of checkpoints: Bridge's ``CheckpointConfig``, Megatron-LM's arguments.
        runtime: the memory store; None takes this process's own. If there can be none, the index stays empty and the
            log says why.
    """

    #: folder of this rank's for files that the loop puts beside a local checkpoint
    side_folder = "local"

    def __init__(self, checkpoint_config: Any, runtime: Runtime | None = None) -> None:
        self.checkpoint_config = checkpoint_config
        self.runtime: Runtime | None = runtime
        self.recovery: Recovery | None = None
        self._step: int | None = None
        try:
            tensor_aware.register()
            if runtime is None:
                self.runtime = _own_runtime()
        except FlashpointError as error:
            self.runtime = None
            log.error("no memory store: %s; the job goes on without it", error)

    @property
    def local_ckpt_dir(self) -> str:
        """Folder of this rank for files beside a local checkpoint; not made before it is needed."""
        return str(self.folder)

    @property
    def folder(self) -> Path:
        runtime = self.runtime
        if runtime is None:
            return Path(self.checkpoint_config.non_persistent_local_ckpt_dir or "/dev/shm/mlflashpoint-none")
        return runtime.config.base_container / runtime.group / f"seat-{runtime.local_rank}" / self.side_folder

    def find_latest(self) -> int:
        """Step of the newest recoverable version, -1 if there is none or a durable checkpoint is to be taken.

        Collective at the first call and remembered from then on: all ranks call it, and get the same answer.
        """
        if self._step is None:
            self._step = self._together()
        return self._step

    @property
    def found(self) -> int:
        """What ``find_latest`` said, -1 before it was asked; asks nobody."""
        return -1 if self._step is None else self._step

    def disable(self, reason: str) -> None:
        """Answer -1 from now on: the loop is not offered what it can't use. All ranks do so together."""
        if self.found != -1:
            log.warning("the memory version of step %d is not used: %s", self.found, reason)
        self._step, self.recovery = -1, None

    def is_pinned(self) -> bool:
        """Whether the recipe names one durable checkpoint to load."""
        return getattr(self.checkpoint_config, "ckpt_step", None) is not None

    def _together(self) -> int:
        """The step that every rank has found; a fault on one of them is no reason to raise in the loop's set-up."""
        runtime = self.runtime
        if runtime is None:
            return -1
        problem: Exception | None = None
        try:
            self.recovery = self._search(runtime)
        except Exception as error:
            problem = error
            log.error("memory can't be asked for a version: %s", error, exc_info=not isinstance(error, FlashpointError))
        if not runtime.agree("local/found", problem is None):
            self.recovery = None
        return -1 if self.recovery is None else self.recovery.step

    def _search(self, runtime: Runtime) -> Recovery | None:
        newest = durable.resume_step(self.checkpoint_config)
        if self.is_pinned():
            log.info(
                "the recipe names the checkpoint to load (ckpt_step, or an iteration's folder): memory is not used"
            )
            # The ranks meet all the same: what the store holds above that step will be of an abandoned past.
            newest = sys.maxsize
        return runtime.find_latest(durable_step=newest)


_last: Runtime | None = None


def _own_runtime() -> Runtime:
    """The store of this process; a second set-up in one process (a restart in place) is a new start of the job."""
    global _last
    if _last is not None:
        _last.close()
    _last = get_runtime()
    return _last
