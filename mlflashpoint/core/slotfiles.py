"""The files of a slot, and what they say it holds; read by any process, without a lock."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.core.files import file_error, read_file
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.shard import MAX_INDEX_BYTES
from mlflashpoint.errors import FlashpointError, ShardFormatError

log = logging.getLogger("mlflashpoint.core")

_MAX_RECORD_BYTES = 64 << 10
_NAME = re.compile(r"((slot|replica)-[0-9]{1,9})\.(commit|data)")
_PLACE = re.compile(r"(slot|replica)-[0-9]{1,9}\..+", re.DOTALL)


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


def scan_seat(seat_dir: Path) -> list[SlotInfo]:
    """What the slots of a seat hold. Reads commit records and sizes only; changes nothing.

    Raises:
        ContainerError: the folder can't be read.
    """
    try:
        names = sorted({match[1] for name in os.listdir(seat_dir) if (match := _NAME.fullmatch(name))})
    except FileNotFoundError:
        return []
    except OSError as error:
        raise file_error("the seat can't be read", error, path=Path(seat_dir)) from error
    return [look_at(Path(seat_dir) / name, replica=name.startswith("replica")) for name in names]


def look_at(slot: Path, *, replica: bool = False) -> SlotInfo:
    """What one slot holds. Reads its commit record and sizes only; changes nothing."""
    record, problem = None, None
    try:
        record = read_record(slot)
        if record is not None:
            check_sizes(slot, record)
    except FlashpointError as error:
        problem = error
    return SlotInfo(slot, record, problem, replica)


def read_record(slot: Path) -> ShardRecord | None:
    """The slot's commit record, None if it has none.

    Raises:
        ShardFormatError: it is malformed or of another format version.
        ContainerError: it can't be read.
    """
    file = file_of(slot, "commit")
    try:
        data = read_file(file, _MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error("the commit record can't be read", error, path=file) from error
    try:
        return ShardRecord.from_json(data)
    except ShardFormatError as error:
        raise ShardFormatError(error.message, remedy=error.remedy, path=file) from None


def still_holds(slot: Path, record: ShardRecord) -> bool:
    """Whether the slot's commit record is that one at this moment."""
    try:
        return read_record(slot) == record
    except FlashpointError:
        return False


def read_index(slot: Path, record: ShardRecord) -> bytes:
    """The slot's index, not looked into; longer than the record says if the file is. Raises ContainerError."""
    file = file_of(slot, "index")
    try:
        return read_file(file, min(record.index_bytes, MAX_INDEX_BYTES))
    except OSError as error:
        raise file_error("the index can't be read", error, path=file) from error


def check_sizes(slot: Path, record: ShardRecord) -> None:
    """Raises ShardFormatError unless index and data have the lengths that the commit record says."""
    for kind, nbytes, exact in (("index", record.index_bytes, True), ("data", record.data_bytes, False)):
        file = file_of(slot, kind)
        try:
            size = os.stat(file, follow_symlinks=False).st_size
        except OSError as error:
            raise ShardFormatError(f"the slot's {kind} is missing: {error.strerror}", path=file) from error
        if size < nbytes or (exact and size != nbytes):
            raise ShardFormatError(f"the slot's {kind} has {size} bytes, its commit record says {nbytes}", path=file)


def remove_files(slot: Path) -> int:
    """Remove all of a slot; returns the bytes freed. Raises OSError."""
    freed = 0
    # The commit record goes first: without it nobody takes the rest for a shard.
    for kind in ("commit", "index", "data", "quarantined"):
        file = file_of(slot, kind)
        if file.exists():
            freed += file.stat().st_blocks * 512
            file.unlink()
    return freed


def clear_places(seat: Path) -> None:
    """Make room for a seat's files: what lies in the place of one and is none goes, or aside if something is in it.

    Whoever calls it holds the seat's lock. A failure is logged only: whatever meets the place then says so.
    """
    try:
        places = [entry for entry in os.scandir(seat) if _PLACE.fullmatch(entry.name)]
        strange = [Path(entry) for entry in places if not entry.is_file(follow_symlinks=False)]
    except OSError as error:
        log.warning("the seat %s can't be looked through: %s", seat, error)
        return
    for path in strange:
        try:
            log.warning("what lay at %s is no file of the store and %s", path, _cleared(path))
        except OSError as error:
            log.warning("what lies at %s is no file of the store; remove it: %s", path, error)


def _cleared(path: Path) -> str:
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return "was removed"
    try:
        path.rmdir()
        return "was removed"
    except OSError:
        aside = path.with_name(f"aside-{secrets.token_hex(4)}-{path.name}")
        path.rename(aside)
        return f"is now {aside}: remove that, it takes memory"


def file_of(slot: Path, kind: str) -> Path:
    """Path of the slot's ``data``, ``index`` or ``commit`` file."""
    return slot.with_name(f"{slot.name}.{kind}")
