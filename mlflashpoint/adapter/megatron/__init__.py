"""Megatron-Core's ``dist_checkpointing`` on the memory store.

Importing this package imports neither Megatron nor torch; the names below are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "MLFlashpointMegatronAsyncSaveStrategy",
    "MLFlashpointMegatronLoadStrategy",
    "MegatronStore",
    "save_local_aware_megatron_checkpoint",
]

_HOMES = {
    "MLFlashpointMegatronAsyncSaveStrategy": "save_strategies",
    "MLFlashpointMegatronLoadStrategy": "load_strategies",
    "MegatronStore": "store",
    "save_local_aware_megatron_checkpoint": "save_utils",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
