"""Room for a shard that this rank fetches from other nodes: in its own slots, beside the replicas, or, last, its own
memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.core.arena import Arena, Slot, file_of
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardCopy, ShardRecord
from mlflashpoint.core.replicas import Replicas
from mlflashpoint.core.rotation import slots_needed
from mlflashpoint.core.saver import commit_files
from mlflashpoint.errors import ContainerError, FlashpointError

log = logging.getLogger("mlflashpoint.core")


@dataclass(frozen=True)
class Fetched:
    """A shard that was fetched and checked.

    Attributes:
        reader: reads it; the caller closes it.
        slot: where it lies on this node now, None if only in this process's memory.
        bad: copies that could not be used.
    """

    reader: ShardReader
    slot: Path | None
    bad: Sequence[ShardCopy]


class RoomFor:
    """Room for one shard, found when its size is known, and used once.

    Args:
        record: the shard's commit record.
        seat: this rank's folder.
        replicas: the slots beside its own; None for none.
        own: whether its own slots may be written to: no save of this process uses them yet.
    """

    def __init__(self, record: ShardRecord, seat: Path, replicas: Replicas | None, *, own: bool) -> None:
        self._record = record
        self._seat = seat
        self._replicas = replicas
        self._own = own
        self._arena: Arena | None = None
        self._slot: Slot | None = None
        self._beside: Path | None = None

    def allocate(self, sizes: tuple[int, ...], *, keep: bool) -> Sequence[memoryview]:
        """Writable buffers of these sizes: index and data; ``keep``: in this node's memory, if there is room."""
        nbytes = self._record.data_bytes
        if keep:
            try:
                if self._own and (slot := self._own_slot(nbytes)) is not None:
                    self._slot = slot
                    return [memoryview(bytearray(sizes[0])), slot.buffer[:nbytes]]
                if self._replicas is not None:
                    buffers = self._replicas.room(self._record, sizes)
                    self._beside = self._replicas.slot_of(-1, self._record.to_json())
                    return buffers
            except ContainerError as error:
                log.warning("a fetched shard is kept in the process's own memory: %s", error)
        return [memoryview(bytearray(size)) for size in sizes]

    def keep(self, buffers: Sequence[memoryview], bad: Sequence[ShardCopy]) -> Fetched:
        """Commit what was fetched; the buffers are filled, and were checked. Raises FlashpointError."""
        record, index = self._record, bytes(buffers[0])
        where: Path | None = None
        try:
            if self._slot is not None:
                commit_files(self._slot, record, index)
                where = self._slot.path
            elif self._beside is not None and self._replicas is not None:
                self._replicas.commit(-1, record.to_json(), buffers)
                where = self._beside
            if where is not None:
                return Fetched(ShardReader.open(where), where, bad)
        except ContainerError as error:
            log.warning("a fetched shard is not kept in the node's memory: %s", error)
        finally:
            self._release()
        return Fetched(ShardReader.from_buffers(record, index, buffers[1]), None, bad)

    def give_up(self, error: FlashpointError) -> None:
        """Nothing came, or nothing good."""
        if self._beside is not None and self._replicas is not None:
            self._replicas.abandon(-1, self._record.to_json(), error)
        if self._slot is not None:
            # Something may still be written into it: the file is left to whoever does so, and another takes its place.
            with contextlib.suppress(OSError):
                os.unlink(file_of(self._slot.path, "data"))
        self._release()

    def _own_slot(self, nbytes: int) -> Slot | None:
        """An own slot that holds nothing, as a save would have filled it; None if there is none to be had.

        One that a save may overwrite is left: what another rank has kept here of the same version is protected too.
        """
        self._arena = arena = Arena(self._seat)
        empty = [slot for slot in arena.adopt() if slot.record is None]
        same = sum(slot.record is not None and slot.record.version == self._record.version for slot in arena.slots)
        if self._replicas is not None and same + 1 >= max(slots_needed(1), len(arena.slots)):
            return None
        if empty:
            slot = max(empty, key=lambda slot: slot.capacity)
            arena.enlarge(slot, max(1, nbytes))
        elif len(arena.slots) < slots_needed(1):
            slot = arena.add(nbytes)
        else:
            return None
        slot.invalidate()
        return slot

    def _release(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._slot = None
