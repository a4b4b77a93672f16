"""File systems: what kind of one holds a path, and whether it is memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: kinds of file system that are node-local memory
MEMORY_KINDS = ("tmpfs", "ramfs")


def filesystem_kind(path: Path) -> str:
    """Kind of file system that holds ``path`` (``tmpfs``, ``ext4``, ...), ``unknown`` if the kernel does not tell."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            mount, _, source = line.partition(" - ")
            if mount.split(" ")[2] == wanted:
                return source.split(" ")[0]
    return "unknown"


def existing_folder(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists; raises OSError."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
