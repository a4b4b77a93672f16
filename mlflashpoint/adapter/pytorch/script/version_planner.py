"""Writes a version that lies in memory to disk as the DCP checkpoint that it is: each rank the shards in its care.

The version may be of more ranks than the job has now, or of fewer.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from mlflashpoint.adapter.pytorch.metadata_codec import VersionMetadata
from mlflashpoint.adapter.pytorch.shards import Shards, item_name


class VersionPlanner(SavePlanner):
    """For ``dcp.save`` of an empty state: plans what some shards hold, and takes it from there.

    Args:
        shards: the version, open until the save is over.
        described: its metadata.
        rank: who writes.
        world_size: ranks that write.
    """

    def __init__(self, shards: Shards, described: VersionMetadata, rank: int, world_size: int) -> None:
        self._shards = shards
        self._described = described
        self._rank = rank
        self._world_size = world_size
        self._places: dict[MetadataIndex, tuple[int, str]] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing is taken from ``state_dict``."""

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for fqn, entry in self._described.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                holder = self._described.holders[fqn, None]
                if self._cares_for(holder):
                    items.append(self._item(holder, MetadataIndex(fqn), WriteItemType.BYTE_IO, None))
                continue
            for number, chunk in enumerate(entry.chunks):
                offsets = tuple(chunk.offsets)
                holder = self._described.holders[fqn, offsets]
                if self._cares_for(holder):
                    index = MetadataIndex(fqn, chunk.offsets, number)
                    data = TensorWriteData(chunk=chunk, properties=entry.properties, size=entry.size)
                    items.append(self._item(holder, index, WriteItemType.SHARD, data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, dataclasses.replace(self._described.metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        stored = self._shards.view(*self._places[write_item.index])
        return io.BytesIO(stored.numpy().tobytes()) if write_item.type is WriteItemType.BYTE_IO else stored

    def _cares_for(self, holder: int) -> bool:
        return holder % self._world_size == self._rank

    def _item(self, holder: int, index: MetadataIndex, kind: WriteItemType, data: TensorWriteData | None) -> WriteItem:
        self._places[index] = holder, item_name(index.fqn, None if index.offset is None else tuple(index.offset))
        return WriteItem(index=index, type=kind, tensor_data=data)
