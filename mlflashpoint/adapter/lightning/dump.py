"""Lightning's own checkpoint content, without what no resume reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.lightning import loops

#: ``load_from_checkpoint`` alone reads these, and they hold whatever objects the recipe passed to its classes
_HYPER_PARAMETERS = (
    "CHECKPOINT_HYPER_PARAMS_KEY",
    "CHECKPOINT_HYPER_PARAMS_NAME",
    "CHECKPOINT_HYPER_PARAMS_TYPE",
)


def dump(trainer: Any) -> dict[str, Any]:
    """What ``Trainer.save_checkpoint`` hands to the strategy, less the hyperparameters."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for owner in (trainer.lightning_module, trainer.datamodule):
        for name in _HYPER_PARAMETERS:
            checkpoint.pop(getattr(owner, name, None), None)  # type: ignore[arg-type]
    loops.count(trainer, checkpoint["loops"]["fit_loop"])
    return checkpoint


def _without_lost_file(state: Any) -> Any:
    """A ModelCheckpoint's state, but for a file that was never finished when the job was killed.

    A durable checkpoint names only files that are older than it. A memory version may name one that was still being
    written, and that has been cleared away since; to replace it later NeMo would fail to remove it.
    """
    last = state.get("last_model_path") if isinstance(state, dict) else None
    if not isinstance(last, (str, Path)) or not str(last) or "://" in str(last):
        return state
    if any(Path(found).exists() for found in (str(last), str(last).removesuffix(".ckpt"))):
        return state
    return {**state, "last_model_path": ""}


def completed(trainer: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` as it fits what is there now: hyperparameters for hooks that look at them, and existing files."""
    filled = dict(checkpoint)
    filled["callbacks"] = {key: _without_lost_file(state) for key, state in checkpoint.get("callbacks", {}).items()}
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and getattr(owner, "hparams", None):
            filled[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    return filled
