"""Where the recipe's own checkpoints go: what it saves into the base container is memory, and not durable."""

from __future__ import annotations

import os
from typing import Any

from mlflashpoint.errors import SettingError


def lies_in(path: object, folder: str) -> bool:
    """Whether ``path`` leads to ``folder`` or into it, whatever way it is written; URLs and None never do."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "://" in text:
        return False
    outer = os.path.realpath(folder)
    return os.path.commonpath([outer, os.path.realpath(os.path.expanduser(text))]) == outer


def misplaced(trainer: Any, base: str) -> SettingError | None:
    """What is wrong if one of the Trainer's checkpoint callbacks saves into the container ``base``, else None.

    A ModelCheckpoint without a ``dirpath`` has one once it is set up.
    """
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if lies_in(folder, base):
            return SettingError(
                f"the dirpath of {type(callback).__name__}, {folder}, lies in the base container, which is memory: "
                "what is saved there is lost with the node",
                setting="MLFLASHPOINT_BASE_CONTAINER",
                value=str(base),
                remedy="give it a dirpath (or the Trainer a default_root_dir, or its logger a folder) on durable "
                "storage, or the job another base container",
            )
    return None
