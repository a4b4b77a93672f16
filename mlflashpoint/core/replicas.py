"""The replicas that this rank keeps for others: slots beside its own, received into, checked and committed.

What may be overwritten is for the owner of a shard to say: each one arrives with the versions that its owner still
needs replicas of. A replica of a rank that sends nothing here any more goes when nobody can need it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.core.arena import Arena, Slot
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.saver import commit_files
from mlflashpoint.core.shard import MAX_INDEX_BYTES
from mlflashpoint.errors import FlashpointError, ReplicationError, StoreFullError

log = logging.getLogger("mlflashpoint.core")


@dataclass(frozen=True)
class Parcel:
    """What stands before a shard on the wire.

    Attributes:
        record: its commit record.
        keep: versions that the sender still needs replicas of.
    """

    record: ShardRecord
    keep: frozenset[Version]

    def to_bytes(self) -> bytes:
        raw = {"record": dataclasses.asdict(self.record), "keep": sorted(self.keep)}
        return json.dumps(raw, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Parcel:
        """Raises ReplicationError for malformed bytes, ShardFormatError for a malformed record in them."""
        try:
            raw: Any = json.loads(data)
            record = ShardRecord.from_fields(raw["record"])
            return cls(record, frozenset(Version(int(number), int(step)) for number, step in raw["keep"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ReplicationError(f"a shard came with a malformed header: {error}") from None


class Replicas:
    """The ``ReplicaSink`` of one rank; thread-safe.

    Args:
        seat: this rank's folder, whose lock this process holds.
        job_id, group: what is taken in must be of.
        obsolete: whether nobody will ever need a shard.
        reused: called with a slot that is about to be overwritten.

    Raises:
        ContainerError: the seat can't be read, or a slot can't be mapped.
    """

    def __init__(
        self,
        seat: Path,
        *,
        job_id: str,
        group: str,
        obsolete: Callable[[ShardRecord], bool],
        reused: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._job_id = job_id
        self._group = group
        self._obsolete = obsolete
        self._reused = reused
        self._arena = Arena(seat, prefix="replica")
        self._arena.adopt()
        self._lock = threading.Lock()
        self._taken: dict[tuple[int, bytes], Slot] = {}

    @property
    def receiving(self) -> bool:
        """Whether a shard is coming in."""
        return bool(self._taken)

    def allocate(self, source: int, header: bytes, sizes: tuple[int, ...]) -> Sequence[memoryview]:
        """Room for a shard of rank ``source``.

        Raises:
            ReplicationError: it is not what that rank may send here.
            StoreFullError: there is no room; names need and have in bytes.
            ContainerError: a file can't be made.
        """
        parcel = Parcel.from_bytes(header)
        record = parcel.record
        if (record.job_id, record.group, record.rank) != (self._job_id, self._group, source):
            raise ReplicationError(
                f"a shard of job {record.job_id!r}, group {record.group!r}, rank {record.rank} from rank {source}",
                rank=source,
            )
        return self._room(source, header, record, sizes, parcel.keep)

    def room(self, record: ShardRecord, sizes: tuple[int, ...]) -> Sequence[memoryview]:
        """Room for a copy of a shard that this rank fetches for itself; raises as ``allocate``.

        Ended by ``commit`` or ``abandon`` with source -1 and the record as header.
        """
        return self._room(-1, record.to_json(), record, sizes, frozenset())

    def commit(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        """Check the digests of what was received, and commit it.

        Raises:
            ShardCorruptError, ShardFormatError: it is not what was sent.
            StoreFullError, ContainerError: a file can't be written.
        """
        record = ShardRecord.from_json(header) if source < 0 else Parcel.from_bytes(header).record
        index = bytes(buffers[0])
        with ShardReader.from_buffers(record, index, buffers[1]) as reader:
            reader.verify()
        slot = self._taken[source, header]
        commit_files(slot, record, index)
        with self._lock:
            del self._taken[source, header]
        log.debug("keeps a replica of step %d of rank %d", record.step, record.rank)

    def slot_of(self, source: int, header: bytes) -> Path:
        """Where what is being received lies."""
        return self._taken[source, header].path

    def abandon(self, source: int, header: bytes, error: FlashpointError) -> None:
        """Give the room up; the slot holds nothing."""
        with self._lock:
            self._taken.pop((source, header), None)
        log.debug("a shard of rank %d was not taken in: %s", source, error)

    def free_strays(self, owners: Collection[int]) -> int:
        """Free the replicas of ranks that send none here any more and that nobody can need; returns the bytes freed.

        Args:
            owners: ranks that do send here.

        Raises:
            ContainerError: a file can't be removed.
        """
        with self._lock:
            busy = {slot.path for slot in self._taken.values()}
            strays = [
                slot
                for slot in self._arena.slots
                if slot.record is not None and slot.record.rank not in owners and self._obsolete(slot.record)
            ]
            return sum(self._arena.remove(slot) for slot in strays if slot.path not in busy)

    def close(self) -> None:
        """Let go of the memory; the files stay."""
        with self._lock:
            self._arena.close()

    def _room(
        self, source: int, header: bytes, record: ShardRecord, sizes: tuple[int, ...], keep: frozenset[Version]
    ) -> Sequence[memoryview]:
        if sizes != (record.index_bytes, record.data_bytes) or record.index_bytes > MAX_INDEX_BYTES:
            raise ReplicationError(f"a shard of {list(sizes)} bytes is not what its record says", rank=source)
        with self._lock:
            if (source, header) in self._taken:
                raise ReplicationError("the same shard is still being taken in", rank=source)
            try:
                slot = self._free_slot(record.data_bytes, lambda held: self._may_go(held, source, keep))
            except StoreFullError as error:
                error.message = f"no room for a replica of the shard of rank {record.rank}: {error.message}"
                error.remedy = "give the memory file system more room: see 'mlflashpoint plan'"
                raise
            self._reused(slot.path)
            # Nobody may take it for a shard from here on, not even after a crash.
            slot.invalidate()
            self._taken[source, header] = slot
        return [memoryview(bytearray(record.index_bytes)), slot.buffer[: record.data_bytes]]

    def _may_go(self, held: ShardRecord | None, source: int, keep: frozenset[Version]) -> bool:
        if held is None:
            return True
        if held.rank == source and Version(held.incarnation, held.step) not in keep:
            return True
        return self._obsolete(held)

    def _free_slot(self, nbytes: int, may_go: Callable[[ShardRecord | None], bool]) -> Slot:
        busy = {slot.path for slot in self._taken.values()}
        free = [slot for slot in self._arena.slots if slot.path not in busy and may_go(slot.record)]
        fitting = [slot for slot in free if slot.capacity >= nbytes and slot.capacity]
        if fitting:
            return min(fitting, key=lambda slot: slot.capacity)
        if free:
            slot = max(free, key=lambda slot: slot.capacity)
            self._arena.enlarge(slot, max(1, nbytes))
            return slot
        return self._arena.add(nbytes)


class NoReplicas:
    """The ``ReplicaSink`` of a process that only reads: it refuses whatever is sent to it."""

    def allocate(self, source: int, header: bytes, sizes: tuple[int, ...]) -> Sequence[memoryview]:
        """Raises ReplicationError."""
        raise ReplicationError("this process keeps no replicas", rank=source)

    def commit(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        """Nothing was taken in."""

    def abandon(self, source: int, header: bytes, error: FlashpointError) -> None:
        """Nothing was taken in."""
