"""Lightning's own checkpoint content, without what no resume reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    return checkpoint


def completed(trainer: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with the hyperparameters of the objects that are there now, for hooks that look at them."""
    filled = dict(checkpoint)
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and getattr(owner, "hparams", None):
            filled[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    return filled
