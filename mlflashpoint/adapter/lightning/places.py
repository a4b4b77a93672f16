"""Where the recipe's own checkpoints go: what it saves into the base container is memory, and not durable."""

from __future__ import annotations

import contextlib
import os
import sys
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
    return os.path.commonpath([outer, _real(text)]) == outer


def _real(path: Any) -> str:
    found: str = os.path.realpath(os.path.expanduser(path))
    return found


def own_folders(trainer: Any, base: str) -> frozenset[str]:
    """Names of the folders in the container ``base`` to which the recipe's checkpoints, loggers and log files go.

    NeMo makes its log folder before it asks for a checkpoint to go on from, Lightning the loggers' before that too.
    """
    asked = [(callback, "dirpath") for callback in trainer.checkpoint_callbacks]
    asked += [(logger, name) for logger in trainer.loggers for name in ("save_dir", "root_dir")]
    state = sys.modules.get("nemo.utils.app_state")
    if state is not None:
        asked.append((state.AppState(), "log_dir"))
    found = []
    for holder, name in asked:
        # A logger of the recipe's own may not be able to tell.
        with contextlib.suppress(Exception):
            found.append(getattr(holder, name))
    outer = os.path.realpath(base)
    inside = [os.path.relpath(_real(path), outer) for path in found if lies_in(path, base)]
    return frozenset(path.split(os.sep)[0] for path in inside if path != os.curdir)


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
