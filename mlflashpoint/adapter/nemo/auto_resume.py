"""AutoResume that takes the newer of the newest memory version and what the recipe's own AutoResume finds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mlflashpoint.adapter.lightning import hooks, left
from mlflashpoint.adapter.lightning.durable import checkpoint_step
from mlflashpoint.adapter.nemo.routing import Routing
from mlflashpoint.errors import FlashpointError

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.found import FromMemory
    from mlflashpoint.adapter.lightning.session import FitSession

_log = logging.getLogger(__name__)

try:
    from nemo.lightning.resume import AutoResume as _AutoResume
except ImportError:
    _AutoResume = object


class MLFlashpointAutoResume(_AutoResume):  # type: ignore[misc, valid-type]
    """Use it in the place of the AutoResume that it was made from; without NeMo it sets ``trainer.ckpt_path`` alone.

    Args:
        session: the wrapped Trainer's fit.
        trainer: the wrapped Trainer.
        routing: its base container.
        default_auto_resume: the recipe's own one, asked for the durable checkpoint and for all else.
    """

    def __init__(self, session: FitSession, trainer: Any, routing: Routing, default_auto_resume: Any = None) -> None:
        if _AutoResume is not object:
            fields = {} if default_auto_resume is None else vars(default_auto_resume)
            super().__init__(**{name: fields[name] for name in _AutoResume.__dataclass_fields__ if name in fields})
        self._session = session
        self._trainer = trainer
        self._routing = routing
        self._default = default_auto_resume

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Set ``trainer.ckpt_path`` to what training is to go on from. Collective: every rank calls it.

        Where the ranks can't talk to each other before ``fit``, or the durable checkpoint has to be read first, the
        choice is made within it; so it is where ``fit`` is given a ``ckpt_path``, which takes the durable one's place.

        The folder of a memory version is no checkpoint of the recipe's: ModelCheckpoint is not told of it, so that no
        retention policy ever removes it, or counts it.
        """
        # Whether the recipe's checkpoint is older than memory, or can be read at all, may show only within ``fit``;
        # ranks that can't talk to each other now may be able to then; and it may be given another path.
        hooks.choose_later(trainer)
        if self._default is not None and getattr(self._default, "resume_if_exists", True):
            left.auto_resume_looks()
        found = None if self._is_too_early() else self._choose(model, reading_later=True)[0]
        if found is not None:
            trainer.ckpt_path = found.path
            return
        if self._default is not None:
            self._default.setup(trainer, model)

    def get_trainer_ckpt_path(self, model: Any = None) -> Path | None:
        """The path to go on from; collective. Raises what the recipe's AutoResume raises if memory has nothing."""
        found, durable = self._choose(model)
        return durable if found is None else Path(found.path)

    def get_context_path(self, model: Any = None) -> Path | None:
        """Folder of the context files of what training goes on from."""
        found = self._session.found
        if found is not None:
            context = Path(found.path) / "context"
            return context if context.is_dir() else None
        return None if self._default is None else self._default.get_context_path(model)

    def _is_too_early(self) -> bool:
        """Whether the ranks can't talk to each other yet: ModelParallelStrategy sets them up only within ``fit``."""
        return self._trainer.world_size > 1 and not dist.is_initialized()

    def _choose(self, model: Any, *, reading_later: bool = False) -> tuple[FromMemory | None, Path | None]:
        """What to go on from: the memory version, or else the path of the durable checkpoint.

        ``reading_later`` says that a durable checkpoint whose step is hidden is compared within ``fit``.
        """
        durable, refusal = None, None
        if self._default is not None:
            try:
                durable = self._default.get_trainer_ckpt_path(model)
            except Exception as error:
                if "already completed" in str(error):
                    raise
                refusal = error
        step = None if durable is None else checkpoint_step(durable)
        if reading_later and not self._all_know(durable is None or step is not None):
            return None, durable
        found = self._session.find(self._trainer, step, durable)
        if found is None and refusal is not None:
            raise refusal
        if found is not None and refusal is not None:
            _log.warning("AutoResume found no durable checkpoint to use: %s", refusal)
        return found, durable

    def _all_know(self, known: bool) -> bool:
        try:
            return self._session.runtime.agree("lightning/durable-named", known)
        except FlashpointError:
            # ``find`` tells what is wrong with the store
            return True
