"""The place that a user gives for a drain directory: whether it can be drained to, or why not; needs no framework."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from pathlib import Path

from mlflashpoint.core.files import write_file
from mlflashpoint.core.filesystem import MEMORY_KINDS, existing_folder, filesystem_kind
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.errors import DrainError

log = logging.getLogger("mlflashpoint.core")

SETTING = "MLFLASHPOINT_DRAIN_DIR"
_GIVE = "give a durable directory that this user may write and all nodes see"
_SEE = "see that it is durable and that all nodes see the same one"


def check_place(root: Path, base: Path) -> None:
    """See, without writing, whether ``root`` can be drained to out of the container ``base``.

    Raises:
        DrainError: it is no directory, or lies in that container.
    """
    real, memory = Path(os.path.realpath(root)), Path(os.path.realpath(base))
    if real == memory or memory in real.parents:
        raise DrainError("the drain directory lies in the memory to drain", path=root, remedy=_GIVE)
    try:
        # A link that leads nowhere counts too: the file system that it leads to may not be mounted.
        if os.path.lexists(root) and not root.is_dir():
            raise DrainError("the drain directory is no directory", path=root, remedy=_GIVE)
        kind = filesystem_kind(existing_folder(real))
    except OSError as error:
        raise unusable(root, error) from error
    if kind in MEMORY_KINDS:
        log.warning("the drain directory %s is on %s, which does not outlive the node; %s", root, kind, _GIVE)


def foresee_place(root: Path, base: Path) -> None:
    """Whether ``make_place`` would succeed, as far as that can be told without making anything; raises as it."""
    check_place(root, base)
    try:
        above = existing_folder(root)
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it can't be written to", str(above))
    except OSError as error:
        raise unusable(root, error) from error


def make_place(root: Path, base: Path, *, below: Path) -> None:
    """Make ``root`` if it is missing, which is logged, and see that it can be written to.

    Args:
        root: what the user gave.
        base: the container that is to be drained to it.
        below: where in it the job's own shards go, once there are any.

    Raises:
        DrainError: as ``check_place``; or it can't be made, or not be written to.
    """
    check_place(root, base)
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700, parents=True)
            kind = filesystem_kind(root)
            log.warning("the drain directory %s did not exist and was made, on %s; %s", root, kind, _SEE)
        # What another user's job of the same name has made there may not be ours to write.
        probe = existing_folder(below) / f".probe-{secrets.token_hex(8)}"
        try:
            write_file(probe, b"x")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise unusable(root, error) from error


def unusable(root: Path, error: OSError, record: ShardRecord | None = None) -> DrainError:
    """What ``error`` of the system means for the drain directory, and for the shard that was to go there."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(root, error.strerror or "no space left", record)
    return DrainError(
        f"the drain directory can't be used: {error.strerror or error}",
        rank=None if record is None else record.rank,
        step=None if record is None else record.step,
        path=error.filename or root,
        remedy=_GIVE,
    )


def full(root: Path, why: str, record: ShardRecord | None = None) -> DrainError:
    """The error for a drain directory that has no room."""
    return DrainError(
        f"the drain directory is full: {why}",
        rank=None if record is None else record.rank,
        step=None if record is None else record.step,
        path=root,
        remedy="free space there, or give another directory",
    )
