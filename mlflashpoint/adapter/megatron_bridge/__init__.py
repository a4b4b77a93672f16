"""Megatron Bridge's local (non-persistent) checkpoints, kept in the memory store.

Under the agent nothing of this is called by hand. As a library::

    import mlflashpoint.adapter.megatron_bridge as mlf_bridge

    checkpoint = CheckpointConfig(save="/durable/run", save_interval=500, ckpt_format="torch_dist")
    mlf_bridge.enable(checkpoint, non_persistent_save_interval=20)

Importing this package imports neither Bridge nor Megatron; the names below are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "MLFlashpointBridgeCheckpointManager",
    "MLFlashpointLocalCheckpointIndex",
    "MLFlashpointLocalCheckpointManager",
    "enable",
]

_HOMES = {
    "MLFlashpointBridgeCheckpointManager": "manager",
    "MLFlashpointLocalCheckpointIndex": "index",
    "MLFlashpointLocalCheckpointManager": "local_manager",
    "enable": "enable",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
