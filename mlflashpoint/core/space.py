"""How much memory files may still take: the file system's limit, the machine's, and the control group's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mlflashpoint.core.files import file_error
from mlflashpoint.core.filesystem import MEMORY_KINDS, filesystem_kind

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(folder: Path) -> int:
    """Bytes that files in ``folder`` may still take.

    A memory file system larger than the memory behind it would not refuse: the kernel would end processes instead. So
    there the available memory of the machine, and the room in the control groups of this process, count too.

    Raises:
        ContainerError: the folder can't be looked at.
    """
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise file_error("the folder can't be looked at", error, path=folder) from error
    limits = [status.f_bavail * status.f_frsize] if status.f_blocks else []
    if filesystem_kind(folder) in MEMORY_KINDS:
        limits += [*_machine(Path("/proc/meminfo")), *_groups(_CGROUP, Path("/proc/self/cgroup"))]
    return max(0, min(limits, default=0))


def _machine(meminfo: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10


def _groups(root: Path, membership: Path) -> Iterator[int]:
    """Room in each control group (version 1 and 2) from that of this process up to the root."""
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if controllers == "":
                yield from _upwards(root, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in names:
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
                yield from _upwards(root / "memory", path, limit, usage, "total_inactive_file")


def _upwards(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        if root not in (group, *group.parents):
            return
        # Outside its own namespace a container sees its path, but not its folder: then only the root counts.
        with contextlib.suppress(OSError, ValueError):
            most = int((group / limit).read_text())
            used = int((group / usage).read_text())
            yield most - used + _statistic(group / "memory.stat", reclaimable)


def _statistic(file: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
