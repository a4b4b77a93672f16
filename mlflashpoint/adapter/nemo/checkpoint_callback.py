"""The callback that a recipe adds to its Trainer to save to memory every N steps."""

from __future__ import annotations

import os
from typing import Any

from mlflashpoint.adapter.lightning.cadence import Cadence
from mlflashpoint.adapter.lightning.fits import session_of
from mlflashpoint.adapter.nemo.bases import Callback
from mlflashpoint.adapter.nemo.routing import canonical
from mlflashpoint.errors import SettingError


class MLFlashpointCheckpointCallback(Callback):  # type: ignore[misc, valid-type]
    """Says when the wrapped Trainer saves to memory. It has no state, so no checkpoint of the recipe mentions it.

    Args:
        checkpoint_base_container: the job's base container, as given to the wrapper.
        every_n_steps: optimizer steps between two memory saves.
        skip_every_n_steps: interval of the recipe's own checkpoints: multiples of it are left to them.
        enabled: False makes the callback do nothing.

    Raises:
        SettingError: a step interval below 1; in ``setup``, that the Trainer was not wrapped, or for another container.
    """

    def __init__(
        self,
        checkpoint_base_container: str | os.PathLike[str],
        every_n_steps: int,
        skip_every_n_steps: int | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__()
        self.checkpoint_base_container = canonical(checkpoint_base_container)
        self.every_n_steps = every_n_steps
        self.skip_every_n_steps = skip_every_n_steps
        self.enabled = enabled
        Cadence(every_n_steps, skip_every_n_steps)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or not self.enabled:
            return
        session = session_of(trainer)
        if session is None:
            raise SettingError(
                "this Trainer saves nothing to memory: it was not wrapped",
                remedy="call wrap_trainer_and_auto_resume_with_mlflashpoint(trainer, ...) before fit",
            )
        if session.base != self.checkpoint_base_container:
            raise SettingError(
                f"the callback's container {self.checkpoint_base_container} is not the Trainer's, {session.base}",
                remedy="give both the same base container",
            )
        session.cadence = Cadence(self.every_n_steps, self.skip_every_n_steps)
