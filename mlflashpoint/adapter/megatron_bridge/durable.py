"""Whether a Bridge recipe names the durable checkpoint to load."""

from __future__ import annotations

from typing import Any


def is_pinned(checkpoint_config: Any) -> bool:
    """Whether the recipe names one durable checkpoint to load, by ``ckpt_step`` or by the folder of an iteration."""
    if getattr(checkpoint_config, "ckpt_step", None) is not None:
        return True
    from megatron.bridge.training.utils.checkpoint_utils import is_checkpoint_iteration_directory

    return bool(is_checkpoint_iteration_directory(getattr(checkpoint_config, "load", None)))
