"""Which step Bridge's own durable checkpoints would resume at, read without unpickling anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: written by every Bridge version beside its own tracker, for Megatron-LM's sake
TRACKER = "latest_checkpointed_iteration.txt"


def tracked_step(directory: str | None) -> int | None:
    """The step that the tracker file in ``directory`` names, None if there is none or it is a release.

    A directory that is not on a file system (an object store's address) is None too: Bridge compares the steps once
    more itself, when it loads.
    """
    if not directory:
        return None
    try:
        text = Path(directory, TRACKER).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def resume_step(checkpoint_config: Any) -> int | None:
    """The step at which Bridge would resume from durable storage, None if it would not.

    With ``finetune`` Bridge takes weights alone from ``load`` and begins at step 0, so that one's step is not on this
    job's axis.
    """
    if getattr(checkpoint_config, "finetune", False):
        return None
    return tracked_step(getattr(checkpoint_config, "load", None))


def is_pinned(checkpoint_config: Any) -> bool:
    """Whether the recipe names one durable checkpoint to load, by ``ckpt_step`` or by the folder of an iteration."""
    if getattr(checkpoint_config, "ckpt_step", None) is not None:
        return True
    from megatron.bridge.training.utils.checkpoint_utils import is_checkpoint_iteration_directory

    return bool(is_checkpoint_iteration_directory(getattr(checkpoint_config, "load", None)))
