"""A fit that goes on from the last step of its training: what comes behind that batch is done, and no batch is trained.

Lightning looks at the limit of steps before all else. It would leave out the validation that was due, the ends of the
epoch and of the training, and with them the recipe's last durable checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning import loaders
from mlflashpoint.adapter.lightning.kinds import diverted

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.found import FromMemory

_log = logging.getLogger(__name__)

#: what ModelCheckpoint knows by itself
_ALWAYS_KNOWN = (None, "step", "epoch")


class _NeverReached(int):
    """A limit that no count reaches; it is the same number to whoever looks at it."""

    def __le__(self, other: object) -> bool:
        # Python asks this first for ``count >= limit``
        return False


def watch(trainer: Any, is_last: Callable[[], bool], done: Callable[[], None]) -> None:
    """Let the next run of the Trainer's fit loop do what comes behind the last batch, if ``is_last`` says so.

    Args:
        trainer: a Trainer that is about to fit, and has loaded a version of memory, or is about to.
        is_last: asked once, when the loops are restored.
        done: called when the fit loop has come to its end.
    """
    loop = trainer.fit_loop
    own = vars(loop).get("run")
    if isinstance(own, _Run):
        own = own.before
    vars(loop)["run"] = _Run(loop, own, is_last, done)


class _Run:
    """In the place of a fit loop's ``run``, for one call."""

    def __init__(self, loop: Any, before: Any, is_last: Callable[[], bool], done: Callable[[], None]) -> None:
        self.before = before
        self._loop = loop
        self._is_last = is_last
        self._done = done

    def __call__(self) -> None:
        loop = self._loop
        del vars(loop)["run"]
        if self.before is not None:
            vars(loop)["run"] = self.before
        loaders.put_back(loop)
        if self._is_last():
            _run_behind_the_last_batch(loop)
        else:
            loop.run()
        self._done()


def _run_behind_the_last_batch(loop: Any) -> None:
    batches = loop.epoch_loop
    limit, run = batches.max_steps, batches.run

    def run_epoch(data_fetcher: Any) -> None:
        batches.max_steps = limit
        if batches._should_check_val_fx(data_fetcher):
            run(data_fetcher)
            return
        # A loop that is restarting looks for one more batch if there is no validation to make up for.
        batches.reset()
        batches.on_run_start(data_fetcher)
        batches._restarting = False

    with diverted(batches, max_steps=_NeverReached(limit), run=run_epoch):
        loop.run()


def is_reached(trainer: Any) -> bool:
    """Whether no step is left to train."""
    return bool(-1 != trainer.max_steps <= trainer.global_step)


def can_be_ended(trainer: Any, resumed: FromMemory) -> bool:
    """Whether the epoch of ``resumed`` can end as it would have ended; every rank may find another answer.

    Not if it was saved elsewhere than behind a batch, and not if somebody looks at a metric of the epoch that is lost.
    """
    if resumed.hook != "on_train_batch_end" or resumed.logged is None:
        return False
    try:
        looks = [*trainer.callbacks, *trainer.lr_scheduler_configs]
        return bool(resumed.logged["whole"]) or all(getattr(one, "monitor", None) in _ALWAYS_KNOWN for one in looks)
    except Exception as error:  # a release, or a recipe, that keeps its plans another way
        _log.debug("whether the training can be ended can't be told: %s", error)
        return False
