"""The drain directory: durable copies of shards that lay in memory, in the same files, from which recovery works too.

``DIR/<job>/<group>/step-<step>.<incarnation>.<run>/rank-<rank>.{data,index,commit}``. The commit record comes last, by
rename, when what was written has been read back and has the right digests. A version counts if the shards of all its
ranks are there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from mlflashpoint.core.filesystem import MEMORY_KINDS, existing_folder, filesystem_kind
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import DRAIN_NODE, ShardCopy, ShardRecord
from mlflashpoint.core.slotfiles import check_sizes, file_of, read_record
from mlflashpoint.errors import DrainError, FlashpointError, OverwrittenError

log = logging.getLogger("mlflashpoint.core")

_VERSION = re.compile(r"step-([0-9]{1,18})\.([0-9]{1,9})\.([0-9a-zA-Z+]{0,64})")
_COMMIT = re.compile(r"(rank-[0-9]{1,9})\.commit")
#: bytes between two looks at the clock, and bytes that may wait in the page cache: else the last sync takes the time
_STRIDE, _UNSYNCED = 4 << 20, 128 << 20
_GIVE = "give a durable directory that this user may write and all nodes see"


class DrainDir:
    """The drained versions of one group of one job.

    Args:
        root: the directory that the user named; it must be one that all nodes see.
        job_id, group: whose versions.
    """

    def __init__(self, root: Path, job_id: str, group: str) -> None:
        self.root = root
        self.path = root / job_id / group

    def check(self, base: Path) -> None:
        """See before anything is written whether it can be drained to, out of the container ``base``.

        Raises:
            DrainError: it is no directory, or lies in that container.
        """
        root, memory = Path(os.path.realpath(self.root)), Path(os.path.realpath(base))
        if root == memory or memory in root.parents:
            raise DrainError("the drain directory lies in the memory to drain", path=self.root, remedy=_GIVE)
        try:
            if root.exists() and not root.is_dir():
                raise DrainError("the drain directory is no directory", path=self.root, remedy=_GIVE)
            kind = filesystem_kind(existing_folder(root))
        except OSError as error:
            raise self._unusable(error) from error
        if kind in MEMORY_KINDS:
            log.warning("the drain directory %s is on %s, which does not outlive the node; %s", self.root, kind, _GIVE)

    def put(self, holding: Holding, *, deadline: float) -> int:
        """Write one shard; nothing is left of it if that fails.

        Args:
            holding: what lies in memory.
            deadline: moment of ``time.monotonic`` at which to give up.

        Returns:
            bytes written, 0 if the shard was there.

        Raises:
            OverwrittenError: the job has overwritten the slot meanwhile.
            DrainError: there is no room, no time, no access, or what was written is not what was read.
        """
        record = holding.record
        slot = self.slot(self._name(record))
        if self._record_at(slot) == record:
            return 0
        temporary = slot.with_name(f"{slot.name}-tmp-{secrets.token_hex(8)}")
        kinds = {"data": holding.data, "index": memoryview(holding.index), "commit": memoryview(record.to_json())}
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.path.parent, self.path, slot.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._check_room(record)
            for kind, content in kinds.items():
                _write(file_of(temporary, kind), content, deadline)
            with ShardReader.open(temporary) as reader:
                reader.verify()
            for kind in kinds:
                os.rename(file_of(temporary, kind), file_of(slot, kind))
            _sync(slot.parent)
        except OSError as error:
            raise self._explained(error, record) from error
        except DrainError:
            raise
        except FlashpointError as error:
            if holding.overwritten:
                raise overwritten(record, holding.slot) from error
            raise DrainError(
                f"what was drained is not what lay in memory: {error.message}", step=record.step
            ) from error
        finally:
            for kind in kinds:
                with contextlib.suppress(OSError):
                    file_of(temporary, kind).unlink(missing_ok=True)
        return record.data_bytes + record.index_bytes

    def remove(self, record: ShardRecord) -> None:
        """Take one shard away again, and its version's folder if it was the only one."""
        slot = self.slot(self._name(record))
        for kind in ("commit", "index", "data"):
            with contextlib.suppress(OSError):
                file_of(slot, kind).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            slot.parent.rmdir()

    def copies(self, *, holder: int) -> list[ShardCopy]:
        """Every shard that was drained whole; reads, changes nothing. Malformed ones are logged and left out."""
        found = []
        for folder in self._versions():
            for name in sorted(os.listdir(folder)):
                match = _COMMIT.fullmatch(name)
                record = self._record_at(folder / match[1]) if match else None
                if match and record is not None and (record.job_id, record.group) == self.path.parts[-2:]:
                    found.append(ShardCopy(record, DRAIN_NODE, holder, f"{DRAIN_NODE}/{folder.name}/{match[1]}", True))
        return found

    def newest_incarnation(self) -> int:
        """Highest number of a start whose versions were drained, 0 for none."""
        return max((int(_VERSION.fullmatch(folder.name)[2]) for folder in self._versions()), default=0)  # type: ignore[index]

    def prune(self) -> None:
        """Remove versions that are older than one of which every shard is here."""
        whole: tuple[int, int] | None = None
        for age, folder in sorted(((self._age(folder), folder) for folder in self._versions()), reverse=True):
            if whole is not None and age < whole:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            records = [self._record_at(folder / m[1]) for n in os.listdir(folder) if (m := _COMMIT.fullmatch(n))]
            ranks = {record.rank for record in records if record is not None}
            if whole is None and any(record and len(ranks) == record.world_size for record in records):
                whole = age

    def slot(self, name: str) -> Path:
        """Prefix of the files of a copy that ``copies`` has listed."""
        _, version, rank = name.split("/")
        return self.path / version / rank

    def _name(self, record: ShardRecord) -> str:
        return f"{DRAIN_NODE}/step-{record.step}.{record.incarnation}.{record.run}/rank-{record.rank}"

    def _versions(self) -> Iterator[Path]:
        if self.path.is_dir():
            yield from (folder for folder in sorted(self.path.iterdir()) if _VERSION.fullmatch(folder.name))

    def _age(self, folder: Path) -> tuple[int, int]:
        match = _VERSION.fullmatch(folder.name)
        assert match is not None
        return int(match[2]), int(match[1])

    def _record_at(self, slot: Path) -> ShardRecord | None:
        try:
            record = read_record(slot)
            if record is not None:
                check_sizes(slot, record)
            return record
        except FlashpointError as error:
            log.warning("left out: %s", error)
            return None

    def _check_room(self, record: ShardRecord) -> None:
        status = os.statvfs(self.path)
        need, have = record.data_bytes + record.index_bytes, status.f_bavail * status.f_frsize
        if need > have:
            raise self._full(record, f"the shard needs {need} bytes, it has {have}")

    def _explained(self, error: OSError, record: ShardRecord) -> DrainError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._full(record, error.strerror or "no space left")
        return self._unusable(error, record)

    def _unusable(self, error: OSError, record: ShardRecord | None = None) -> DrainError:
        return DrainError(
            f"the drain directory can't be used: {error.strerror or error}",
            rank=None if record is None else record.rank,
            step=None if record is None else record.step,
            path=error.filename or self.root,
            remedy=_GIVE,
        )

    def _full(self, record: ShardRecord, why: str) -> DrainError:
        return DrainError(
            f"the drain directory is full: {why}",
            rank=record.rank,
            step=record.step,
            path=self.root,
            remedy="free space there, or give another directory",
        )


def overwritten(record: ShardRecord, slot: Path | None) -> OverwrittenError:
    """The error for a shard that lies in ``slot`` no more."""
    return OverwrittenError(
        "the job has overwritten the version while it was being copied", rank=record.rank, step=record.step, path=slot
    )


def _write(file: Path, content: memoryview, deadline: float) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as stream:
        written = synced = 0
        while written < len(content):
            if time.monotonic() > deadline:
                raise DrainError(
                    "the time for the drain is over",
                    setting="MLFLASHPOINT_DRAIN_BUDGET_S",
                    path=file,
                    remedy="raise it, within the grace that the scheduler gives, or use a faster directory",
                )
            written += stream.write(content[written : written + _STRIDE])
            if written - synced >= _UNSYNCED:
                _sync_data(descriptor)
                synced = written
        _sync_data(descriptor)


def _sync_data(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
