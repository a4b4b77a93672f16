"""The replication manager of the user guide: says how many replicas the stores of a process keep."""

from __future__ import annotations

from typing import Any


class ReplicationManager:
    """Settings of the replication; the store itself replicates.

    Args:
        replicas: copies of each shard on other failure domains; None leaves it to MLFLASHPOINT_REPLICAS.
    """

    def __init__(self, replicas: int | None = None) -> None:
        self.replicas = replicas

    def initialize(self, checkpoint_object_manager: Any, *ignored: Any, **also_ignored: Any) -> None:
        """Tell the stores that ``checkpoint_object_manager`` will open; further arguments are accepted and not used."""
        if self.replicas is not None:
            checkpoint_object_manager.settings["replicas"] = self.replicas
