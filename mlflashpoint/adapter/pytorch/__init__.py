"""PyTorch's distributed checkpoint (DCP) on the memory store."""

from __future__ import annotations

from mlflashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.adapter.pytorch.read_only_store import ReadOnlyStore
from mlflashpoint.adapter.pytorch.store import MemoryStore

__all__ = ["MemoryStorageReader", "MemoryStorageWriter", "MemoryStore", "ReadOnlyStore", "StructureSavePlanner"]
