"""The base classes of what a recipe imports: NeMo's where NeMo is installed, else those of the Lightning that is."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def _first(*candidates: tuple[str, str]) -> Any:
    """The first class that can be imported; each candidate is ``(module, name)``."""
    for module, name in candidates:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    raise ImportError("mlflashpoint.adapter.nemo needs lightning, pytorch-lightning or nemo-toolkit to be installed")


Callback = _first(("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback"))
CheckpointIO = _first(
    ("nemo.utils.callbacks.dist_ckpt_io", "AsyncCompatibleCheckpointIO"),
    ("lightning.fabric.plugins", "CheckpointIO"),
    ("lightning_fabric.plugins", "CheckpointIO"),
)
