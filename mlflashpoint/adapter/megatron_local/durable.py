"""Which step a Megatron loop's own durable checkpoints would resume at, read without unpickling anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Megatron-LM's; every version of Bridge writes it beside its own
TRACKER = "latest_checkpointed_iteration.txt"


def tracked_step(directory: str | None) -> int | None:
    """The step that the tracker file in ``directory`` names, None if there is none or it is a release.

    A directory that is not on a file system (an object store's address) is None too: the loop compares the
    steps once more itself, when it loads.
    """
    if not directory:
        return None
    try:
        text = Path(directory, TRACKER).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def resume_step(config: Any) -> int | None:
    """The step at which the loop would resume from durable storage, None if it would not.

    With ``finetune`` it takes weights alone from ``load`` and begins at step 0, so that one's step is not on this
    job's axis.
    """
    if getattr(config, "finetune", False):
        return None
    return tracked_step(getattr(config, "load", None))
