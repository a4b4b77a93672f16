"""What Bridge asks when it decides whether to resume."""

from __future__ import annotations

from mlflashpoint.adapter.megatron_bridge import durable
from mlflashpoint.adapter.megatron_local.index import LocalCheckpointIndex


class MLFlashpointLocalCheckpointIndex(LocalCheckpointIndex):
    """``LocalCheckpointIndex`` for Bridge's ``CheckpointConfig``."""

    side_folder = "bridge"

    def is_pinned(self) -> bool:
        """Whether the recipe names one durable checkpoint to load, by ``ckpt_step`` or by an iteration's folder."""
        return durable.is_pinned(self.checkpoint_config)
