"""The ids under the import path of the user guide."""

from __future__ import annotations

from mlflashpoint.core.ids import CheckpointContainerId, CheckpointObjectId

__all__ = ["CheckpointContainerId", "CheckpointObjectId"]
