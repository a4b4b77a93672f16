"""``mlflashpoint clean``: remove a job's memory container, and never under a process that uses it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

from mlflashpoint.commands.inventory import arguments, base_from, human_bytes, reported
from mlflashpoint.core import belongings
from mlflashpoint.core.container import IDENTITY_FILE
from mlflashpoint.core.manifest import seats_of
from mlflashpoint.core.seat import SeatLock
from mlflashpoint.errors import ContainerError


def main(argv: list[str]) -> int:
    """Exit code 0: removed, or there was nothing; 1: refused, or not confirmed with ``--yes``."""
    options = arguments(
        "clean",
        "Remove a job's versions from this node's memory; files that the store has not made stay.",
        argv,
        ("--yes", "remove, do not only say what"),
    )

    def clean() -> int:
        base = base_from(options.base)
        if not os.path.lexists(base):
            sys.stdout.write(f"{base}: nothing is there\n")
            return 0
        _check(base)
        with contextlib.ExitStack() as locks:
            # Held until the end: no process can take a seat while it is being removed.
            for group in base.iterdir():
                for seat in seats_of(group).values() if group.is_dir() else ():
                    locks.callback(SeatLock(seat, wait_s=0).release)
            ours, others = belongings.sort_out(base)
            nbytes = sum(file.lstat().st_blocks * 512 for path in ours for file in (path, *path.rglob("*")))
            left = f"; {len(others)} that the store has not made stay: {_named(others, base)}" if others else ""
            if not options.yes:
                sys.stdout.write(f"{base}: would remove {human_bytes(nbytes)}{left}; add --yes to do it\n")
                return 1
            _remove(base)
        sys.stdout.write(f"{base}: removed {human_bytes(nbytes)}{left}\n")
        return 0

    return reported("clean", clean)


def _check(base: Path) -> None:
    status = os.lstat(base)
    if not stat.S_ISDIR(status.st_mode) or not (base / IDENTITY_FILE).is_file():
        raise ContainerError("this is no memory container, nothing is removed", path=base)
    if status.st_uid != os.getuid():
        raise ContainerError(
            f"the container belongs to user {status.st_uid}", path=base, remedy="run this as that user"
        )


def _remove(base: Path) -> None:
    try:
        belongings.remove(base)
    except OSError as error:
        raise ContainerError(
            f"the container can't be removed: {error.strerror}", path=error.filename or base
        ) from error


def _named(paths: list[Path], base: Path) -> str:
    return ", ".join(str(path.relative_to(base)) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
