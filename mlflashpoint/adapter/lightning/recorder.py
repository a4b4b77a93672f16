"""The callback that tells a FitSession of the batches. It is the last in the list, so ModelCheckpoint comes before it.

It has no state, so no checkpoint mentions it. Under the agent the Trainer has it only while it fits; in the library
form it stays, and ends the session too.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning import ends, tuners
from mlflashpoint.adapter.lightning.packages import pytorch_package

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.session import FitSession

_log = logging.getLogger(__name__)


@cache
def _recorder_class(base: type) -> type:
    class MLFlashpointRecorder(base):  # type: ignore[misc]
        def __init__(self, session: FitSession) -> None:
            super().__init__()
            self._session = session

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                self._session.reopen(trainer)
                self._check_places(trainer)

        def _check_places(self, trainer: Any) -> None:
            if self._session.of_agent:
                guarded(self._session, "look where checkpoints go", self._session.check_places, trainer)
            else:
                self._session.check_places(trainer)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # a ModelCheckpoint that comes later in the list has its folder only now
            self._check_places(trainer)
            guarded(self._session, "start", self._session.started, trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            guarded(self._session, "save", self._session.batch_ended, trainer)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            guarded(self._session, "end the epoch", self._session.epoch_ended, trainer)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            tuners.allow(trainer)
            self._session.finish(success=False)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            tuners.allow(trainer)
            # the agent ends its session later, when nothing can fail any more
            if stage == "fit" and not self._session.of_agent:
                self._session.finish(success=ends.is_done(trainer))

    return MLFlashpointRecorder


def attach(trainer: Any, session: FitSession) -> None:
    """Make the session's recorder the last of the trainer's callbacks, unless they have it."""
    if any(is_recorder(callback) for callback in trainer.callbacks):
        return
    trainer.callbacks.append(_recorder_class(pytorch_package(trainer).Callback)(session))


def detach(trainer: Any) -> None:
    """Leave the trainer's callbacks as the recipe has them."""
    trainer.callbacks[:] = [callback for callback in trainer.callbacks if not is_recorder(callback)]


def is_recorder(callback: object) -> bool:
    return type(callback).__name__ == "MLFlashpointRecorder" and type(callback).__module__ == __name__


def guarded(session: FitSession, what: str, action: Any, *args: Any) -> None:
    """Run our part of a hook: a fault of ours is logged, and the training goes on (strict: raised)."""
    try:
        action(*args)
    except Exception as error:
        if session.strict:
            raise
        _log.error("mlflashpoint could not %s: %s: %s", what, type(error).__name__, error, exc_info=error)
