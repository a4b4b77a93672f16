"""Names that Bridge's config refers to us by."""

from __future__ import annotations

PACKAGE = "mlflashpoint"
MANAGER = "mlflashpoint.adapter.megatron_bridge.MLFlashpointBridgeCheckpointManager"
