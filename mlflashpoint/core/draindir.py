"""The drain directory: durable copies of shards that lay in memory, in the same files, from which recovery works too.

``DIR/<job>/<group>/step-<step>.<incarnation>.<run>/rank-<rank>.{data,index,commit}``. The commit record comes last, by
rename, when what was written has been read back and has the right digests. A version counts if the shards of all its
ranks are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from mlflashpoint.core.drainplace import check_place, full, make_place, unusable
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import DRAIN_NODE, ShardCopy, ShardRecord
from mlflashpoint.core.slotfiles import SlotInfo, file_of, look_at
from mlflashpoint.errors import DrainError, FlashpointError, OverwrittenError

log = logging.getLogger("mlflashpoint.core")

#: a version of which something was drained, as a folder in that of its group
VERSION = re.compile(r"step-([0-9]{1,18})\.([0-9]{1,9})\.([0-9a-zA-Z+]{0,64})")
_SHARD = re.compile(r"(rank-[0-9]{1,9})\.(commit|data)")
#: bytes between two looks at the clock, and bytes that may wait in the page cache: else the last sync takes the time
_STRIDE, _UNSYNCED = 4 << 20, 128 << 20


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
        check_place(self.root, base)

    def prepare(self, base: Path) -> None:
        """See that it can be drained to out of the container ``base``: it is made if it is missing, and written to.

        Raises:
            DrainError: as ``check``; or it can't be made, or not be written to.
        """
        make_place(self.root, base, below=self.path)

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
        if _sound(look_at(slot)) == record:
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
            raise unusable(self.root, error, record) from error
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
        for folder in self.versions():
            for shard in self.shards(folder):
                record = _sound(shard)
                if record is not None:
                    where = f"{DRAIN_NODE}/{folder.name}/{shard.path.name}"
                    found.append(ShardCopy(record, DRAIN_NODE, holder, where, True))
        return found

    def versions(self) -> list[Path]:
        """The folder of each version of which something was drained, whole or not; raises OSError."""
        folders = sorted(self.path.iterdir()) if self.path.is_dir() else []
        return [folder for folder in folders if VERSION.fullmatch(folder.name)]

    def shards(self, folder: Path) -> list[SlotInfo]:
        """What lies in the folder of a version, and what is the matter with it; raises OSError."""
        try:
            names = sorted({match[1] for name in os.listdir(folder) if (match := _SHARD.fullmatch(name))})
        except FileNotFoundError:
            # Another rank, which has drained a newer version, has removed it since it was listed.
            return []
        return [self._checked(look_at(folder / name)) for name in names]

    def newest_incarnation(self) -> int:
        """Highest number of a start whose versions were drained, 0 for none."""
        return max((self._age(folder)[0] for folder in self.versions()), default=0)

    def prune(self) -> None:
        """Remove versions that are older than one of which every shard is here."""
        whole: tuple[int, int] | None = None
        try:
            for age, folder in sorted(((self._age(folder), folder) for folder in self.versions()), reverse=True):
                if whole is not None and age < whole:
                    shutil.rmtree(folder, ignore_errors=True)
                    continue
                records = [_sound(shard) for shard in self.shards(folder)]
                ranks = {record.rank for record in records if record is not None}
                if whole is None and any(record and len(ranks) == record.world_size for record in records):
                    whole = age
        except OSError as error:
            log.warning("older versions stay in the drain directory: %s", error)

    def slot(self, name: str) -> Path:
        """Prefix of the files of a copy that ``copies`` has listed."""
        _, version, rank = name.split("/")
        return self.path / version / rank

    def _name(self, record: ShardRecord) -> str:
        return f"{DRAIN_NODE}/step-{record.step}.{record.incarnation}.{record.run}/rank-{record.rank}"

    def _age(self, folder: Path) -> tuple[int, int]:
        match = VERSION.fullmatch(folder.name)
        assert match is not None
        return int(match[2]), int(match[1])

    def _checked(self, shard: SlotInfo) -> SlotInfo:
        record = shard.record
        if record is None or shard.problem is not None or (record.job_id, record.group) == self.path.parts[-2:]:
            return shard
        problem = DrainError(f"a shard of job {record.job_id!r}, group {record.group!r}", path=shard.path)
        return dataclasses.replace(shard, problem=problem)

    def _check_room(self, record: ShardRecord) -> None:
        status = os.statvfs(self.path)
        need, have = record.data_bytes + record.index_bytes, status.f_bavail * status.f_frsize
        if need > have:
            raise full(self.root, f"the shard needs {need} bytes, it has {have}", record)


def _sound(shard: SlotInfo) -> ShardRecord | None:
    if shard.problem is not None:
        log.warning("left out: %s", shard.problem)
        return None
    return shard.record


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
