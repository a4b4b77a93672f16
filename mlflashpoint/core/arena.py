"""The arena: the slots of one seat. Each is a file in memory that is allocated once, mapped once and reused.

A restart finds its predecessor's slots and takes them over as they are; nothing here ever shortens a slot or touches
its content. The caller holds the seat (``SeatLock``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from mlflashpoint.core import device, mapping
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.errors import ContainerError, FlashpointError, ShardFormatError, StoreFullError

log = logging.getLogger("mlflashpoint.core")

_GRAIN = 2 << 20
_MAX_RECORD_BYTES = 64 << 10


class Slot:
    """One slot, mapped.

    Attributes:
        path: prefix of its files, for example ``.../seat-0/slot-1``.
        record: what it holds, by its commit record; None if nothing that is complete.
        views: cache of the saver, dropped when the slot is mapped anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: ShardRecord | None = None
        self.views: tuple[object, list[torch.Tensor]] | None = None
        self._mapping: mapping.Mapping | None = None
        self._pinned: bool | None = None
        self._owner = os.getpid()

    @property
    def data_path(self) -> Path:
        return file_of(self.path, "data")

    @property
    def capacity(self) -> int:
        """Bytes that it can hold."""
        return self._mapping.nbytes if self._mapping is not None else 0

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, a writable uint8 tensor of ``capacity`` elements."""
        return self._opened().bytes

    @property
    def buffer(self) -> memoryview:
        """All of it, writable."""
        return self._opened().buffer

    def invalidate(self) -> None:
        """Declare it empty, before it is overwritten: remove the commit record.

        Raises:
            ContainerError: it can't be removed, or the slot belongs to the process that this one was forked from.
        """
        if self._owner != os.getpid():
            raise ContainerError("the slot belongs to the parent process", path=self.path)
        try:
            file_of(self.path, "commit").unlink(missing_ok=True)
        except OSError as error:
            raise ContainerError(f"the slot can't be invalidated: {error.strerror}", path=self.path) from error
        self.record = None

    def pin(self) -> None:
        """Page-lock it for CUDA, once; stays pageable where the driver refuses."""
        if self._pinned is None:
            self._pinned = device.pin(self.bytes)

    def _opened(self) -> mapping.Mapping:
        if self._mapping is None:
            raise ContainerError("the slot is closed", path=self.path)
        return self._mapping

    def remap(self) -> None:
        self.unmap()
        self._mapping = mapping.map_writable(self.data_path)
        self._mapping.populate(write=True)

    def unmap(self) -> None:
        if self._pinned:
            device.unpin(self.bytes)
        self._pinned = None
        self.views = None
        self._mapping = None


class Arena:
    """The slots of one seat.

    Args:
        seat_dir: the seat's folder; the caller holds its lock.
        prefix: ``slot`` for this rank's own shards, ``replica`` for received ones.
    """

    def __init__(self, seat_dir: Path, *, prefix: str = "slot") -> None:
        self.seat_dir = Path(seat_dir)
        self.prefix = prefix
        self.slots: list[Slot] = []

    def adopt(self) -> list[Slot]:
        """Take over the slots that are there, whatever they hold, and remove left-over temporary files.

        Raises:
            ContainerError: the seat can't be read or a slot can't be mapped.
        """
        self._reap()
        known = {slot.path for slot in self.slots}
        for number in self._numbers():
            slot = Slot(self.seat_dir / f"{self.prefix}-{number}")
            if slot.path in known:
                continue
            try:
                slot.record = read_record(slot.path)
            except ShardFormatError as error:
                log.warning("a slot holds nothing that can be used: %s", error)
            slot.remap()
            self.slots.append(slot)
        return self.slots

    def reserve(self, count: int, nbytes: int) -> None:
        """Have at least ``count`` slots, and all of at least ``nbytes`` bytes. Content of existing slots stays.

        Raises:
            StoreFullError: there is no room; names need and have in bytes; nothing was written.
            ContainerError: a file can't be made.
        """
        size = max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)
        small = [slot for slot in self.slots if slot.capacity < size]
        if len(self.slots) >= count and not [slot for slot in small if slot.capacity < nbytes]:
            return
        taken = {slot.path for slot in self.slots}
        fresh: list[Slot] = []
        number = 0
        while len(self.slots) + len(fresh) < count:
            path = self.seat_dir / f"{self.prefix}-{number}"
            if path not in taken:
                fresh.append(Slot(path))
            number += 1
        need = sum(size - slot.capacity for slot in small) + size * len(fresh)
        have = mapping.free_bytes(self.seat_dir)
        if need > have:
            raise StoreFullError(
                f"{count} slots of {size} bytes need {need} more bytes, the store has {have}",
                path=self.seat_dir,
                remedy="give the memory file system more room, or keep fewer versions",
            )
        for slot in (*small, *fresh):
            mapping.allocate(slot.data_path, size)
        for slot in (*small, *fresh):
            slot.remap()
        self.slots += fresh

    def close(self) -> None:
        """Let go of the mappings; the files stay."""
        for slot in self.slots:
            slot.unmap()
        self.slots = []

    def _numbers(self) -> list[int]:
        pattern = re.compile(rf"{re.escape(self.prefix)}-([0-9]{{1,9}})\.data")
        try:
            return sorted(int(match[1]) for name in os.listdir(self.seat_dir) if (match := pattern.fullmatch(name)))
        except OSError as error:
            raise ContainerError(f"the seat can't be read: {error.strerror}", path=self.seat_dir) from error

    def _reap(self) -> None:
        pattern = re.compile(rf"{re.escape(self.prefix)}-[0-9]{{1,9}}\.(data|index|commit)\.tmp-.*")
        with contextlib.suppress(OSError):
            for name in os.listdir(self.seat_dir):
                if pattern.fullmatch(name):
                    (self.seat_dir / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class SlotInfo:
    """What a slot holds, read by any process.

    Attributes:
        path: prefix of its files.
        record: the commit record; None if it holds nothing complete.
        problem: why what it holds can't be used.
        replica: whether it was received from a peer.
    """

    path: Path
    record: ShardRecord | None
    problem: FlashpointError | None
    replica: bool


_COMMIT = re.compile(r"((slot|replica)-[0-9]{1,9})\.(commit|data)")


def scan_seat(seat_dir: Path) -> list[SlotInfo]:
    """What the slots of a seat hold. Reads commit records and sizes only; changes nothing.

    Raises:
        ContainerError: the folder can't be read.
    """
    try:
        names = sorted({match[1] for name in os.listdir(seat_dir) if (match := _COMMIT.fullmatch(name))})
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ContainerError(f"the seat can't be read: {error.strerror}", path=seat_dir) from error
    found = []
    for name in names:
        path = Path(seat_dir) / name
        record, problem = None, None
        try:
            record = read_record(path)
            if record is not None:
                _check_sizes(path, record)
        except FlashpointError as error:
            problem = error
        found.append(SlotInfo(path, record, problem, name.startswith("replica")))
    return found


def read_record(slot: Path) -> ShardRecord | None:
    """The slot's commit record, None if it has none.

    Raises:
        ShardFormatError: it is malformed or of another format version.
        ContainerError: it can't be read.
    """
    file = file_of(slot, "commit")
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ContainerError(f"the commit record can't be read: {error.strerror}", path=file) from error
    try:
        return ShardRecord.from_json(data)
    except ShardFormatError as error:
        raise ShardFormatError(error.message, remedy=error.remedy, path=file) from None


def _check_sizes(slot: Path, record: ShardRecord) -> None:
    for kind, nbytes, exact in (("index", record.index_bytes, True), ("data", record.data_bytes, False)):
        file = file_of(slot, kind)
        try:
            size = os.stat(file, follow_symlinks=False).st_size
        except OSError as error:
            raise ShardFormatError(f"the slot's {kind} is missing: {error.strerror}", path=file) from error
        if size < nbytes or (exact and size != nbytes):
            raise ShardFormatError(f"the slot's {kind} has {size} bytes, its commit record says {nbytes}", path=file)


def file_of(slot: Path, kind: str) -> Path:
    """Path of the slot's ``data``, ``index`` or ``commit`` file."""
    return slot.with_name(f"{slot.name}.{kind}")
