"""A holding: one committed copy on this node, its bytes ready to be read by another node or by a drain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mlflashpoint.core import mapping
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.slot import Slot
from mlflashpoint.core.slotfiles import file_of, read_index, read_record, still_holds
from mlflashpoint.errors import ShardFormatError


@dataclass(frozen=True)
class Holding:
    """The bytes of one committed shard, not to be written to.

    Attributes:
        record: its commit record.
        index: its index.
        data: its data, ``record.data_bytes`` bytes; keeps the memory alive.
        slot: prefix of the files that it was opened from, None for memory of this process's own.
    """

    record: ShardRecord
    index: bytes = field(repr=False)
    data: memoryview = field(repr=False)
    slot: Path | None = None

    @property
    def overwritten(self) -> bool:
        """Whether its slot holds something else by now; its bytes may be those of another version then."""
        return self.slot is not None and not still_holds(self.slot, self.record)

    @property
    def buffers(self) -> list[memoryview]:
        """What goes over the wire: index and data."""
        return [memoryview(self.index), self.data]

    @classmethod
    def open(cls, slot: Path) -> Holding:
        """What the slot with that prefix holds, by a mapping of its own.

        Raises:
            ShardFormatError: it holds no committed shard, or a malformed one.
            ContainerError: a file can't be read.
        """
        record = read_record(slot)
        if record is None:
            raise ShardFormatError("the slot holds no committed shard", path=slot)
        mapped = mapping.map_readable(file_of(slot, "data"), record.data_bytes)
        data = memoryview(b"") if mapped is None else mapped.buffer
        return cls(record, _index(slot, record), data, slot)

    @classmethod
    def of(cls, slot: Slot, record: ShardRecord) -> Holding:
        """What this process has just committed to ``slot``; raises as ``open``."""
        return cls(record, _index(slot.path, record), slot.buffer[: record.data_bytes])


def _index(slot: Path, record: ShardRecord) -> bytes:
    index = read_index(slot, record)
    if len(index) != record.index_bytes:
        raise ShardFormatError(
            f"the index has not the {record.index_bytes} bytes that its commit record says", path=file_of(slot, "index")
        )
    return index
