"""The checkpoint manager that a recipe can name in ``checkpoint.custom_manager_class``."""

from __future__ import annotations

import copy
from typing import Any

from megatron.bridge.training.checkpointing import DefaultCheckpointManager

from mlflashpoint.adapter.megatron_bridge.local_manager import MLFlashpointLocalCheckpointManager


class MLFlashpointBridgeCheckpointManager:
    """Bridge's own checkpoint manager, with local checkpoints in the memory store.

    Durable saves, loads from durable storage and asynchronous saves are Bridge's, unchanged. With PEFT Bridge needs the
    agent beside it: by itself it fails when local checkpoints are on.

    Args:
        checkpoint_config: Bridge's ``CheckpointConfig``.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        # Without the type Bridge makes no local manager of its own, which would claim a folder for it.
        bare = copy.copy(checkpoint_config)
        bare.non_persistent_ckpt_type = None
        self._default = DefaultCheckpointManager(bare)
        self._default.checkpoint_config = checkpoint_config
        self._local: MLFlashpointLocalCheckpointManager | None = None
        if checkpoint_config.non_persistent_ckpt_type == "local":
            self._local = MLFlashpointLocalCheckpointManager(checkpoint_config)
            self.checkpointing_context["local_checkpoint_manager"] = self._local

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """Bridge's context; its ``local_checkpoint_manager`` is what Bridge's resume decision asks."""
        context: dict[str, Any] = self._default.checkpointing_context
        return context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save as ``ctx`` says: to memory if it is non-persistent, else by Bridge."""
        if self._local is not None:
            self._local.describe(ctx.state.cfg, ctx.model)
        # The protocol had no callbacks before 0.5.
        self._default.save(ctx, *([callback_manager] if _takes_callbacks() else []))

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load from memory if its version is the newest and fits, else what Bridge finds.

        Returns:
            step and floating point operations so far, as Bridge does.
        """
        if self._local is None:
            loaded: tuple[int, int] = self._default.load(ctx)
            return loaded
        with self._local.loading(ctx.state, ctx.model):
            loaded = self._default.load(ctx)
        return loaded

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """As Bridge's own."""
        self._default.finalize_async_saves(state=state, blocking=blocking, terminate=terminate)


def _takes_callbacks() -> bool:
    import inspect

    return "callback_manager" in inspect.signature(DefaultCheckpointManager.save).parameters
