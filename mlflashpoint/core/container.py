"""The base container: the folder on each node in which one job's versions live, and the checks before it is used.

``container.json`` gives it an identity: the job, the user, and a random node id that names this memory. The id is lost
with the memory, so a replaced or rebooted node is another node, whatever its host name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.core.files import read_file, write_file
from mlflashpoint.core.filesystem import MEMORY_KINDS, existing_folder, filesystem_kind
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.record import FORMAT_VERSION
from mlflashpoint.errors import ContainerError, ForeignContainerError, StoreFullError
from mlflashpoint.settings import StoreConfig, check_name

IDENTITY_FILE = "container.json"
#: the group whose versions lie in the base container itself
DEFAULT_GROUP = "default"
_SETTING = "MLFLASHPOINT_BASE_CONTAINER"
_MAX_IDENTITY_BYTES = 64 << 10


@dataclass(frozen=True)
class Container:
    """An opened base container.

    Attributes:
        path: absolute path of the folder.
        job_id: the job that it belongs to.
        uid: the user that it belongs to.
        node: 128 random bits in hex, made once: the identity of this node's memory.
    """

    path: Path
    job_id: str
    uid: int
    node: str

    def group_dir(self, group: str) -> Path:
        return self.path / group

    def seat_dir(self, group: str, local_rank: int) -> Path:
        """The folder of the seat, made if it is missing; raises ContainerError."""
        seat = self.path / group / f"seat-{local_rank}"
        for folder in (seat.parent, seat):
            _make_folder(folder)
        return seat


def check_group(group: str) -> None:
    """Raises SettingError unless ``group`` can name a folder in a container beside its other files."""
    check_name("a group", group if not group.startswith("step-") and group != IDENTITY_FILE else "")


def open_container(config: StoreConfig, own: Collection[str] = ()) -> Container:
    """Check and open the job's base container, made if it is missing. Safe when several local ranks do so at once.

    Args:
        config: the settings.
        own: names of what the job itself keeps in the folder, and may have made before this; left alone.

    Raises:
        ContainerError: not a folder of this user's, not on tmpfs, not writable, or holding other files.
        ForeignContainerError: another job's or another user's.
        StoreFullError: not even the identity file has room.
    """
    path = config.base_container
    _check_kind(config)
    with _explained(path):
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    _check_owner(path)
    # Under the folder there may be another file system than its parent's.
    _check_kind(config)
    identity = read_container(path)
    if identity is None:
        _check_free(path, own)
        identity = _write_identity(Container(path, config.job_id, os.getuid(), secrets.token_hex(16)))
    _check_identity(identity, config)
    with _explained(path):
        if os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o700)
        probe = path / f"{IDENTITY_FILE}.tmp-{secrets.token_hex(8)}"
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        probe.unlink()
    return identity


def check_container(config: StoreConfig) -> None:
    """Whether ``open_container`` would succeed, as far as that can be told without making anything; raises as it."""
    path = config.base_container
    _check_kind(config)
    with _explained(path):
        if not os.path.lexists(path):
            above = existing_folder(path)
            if not os.access(above, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))
            return
    _check_owner(path)
    with _explained(path):
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it can't be written to", str(path))
    identity = read_container(path)
    if identity is None:
        _check_free(path)
    else:
        _check_identity(identity, config)


def look_into(path: Path) -> Container | None:
    """The container at ``path``, for a process that only reads it; None if there is none, or no such folder.

    Raises:
        ContainerError: it is unsafe, or can't be read; as ``open_container`` and ``read_container``.
        ForeignContainerError: it is another user's.
    """
    if not os.path.lexists(path):
        return None
    _check_owner(path)
    return read_container(path)


def read_container(path: Path) -> Container | None:
    """The container at ``path`` as its identity file says, None if it has none; makes nothing, checks no owner.

    Raises:
        ContainerError: the file can't be read, is malformed, or is of an unknown format version.
    """
    file = path / IDENTITY_FILE
    try:
        data = read_file(file, _MAX_IDENTITY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error
    try:
        raw: Any = json.loads(data) if len(data) <= _MAX_IDENTITY_BYTES else None
        kinds = {"format_version": int, "job_id": str, "uid": int, "node": str}
        if not isinstance(raw, dict) or {name: type(value) for name, value in raw.items()} != kinds:
            raise ValueError("not the fields of an identity file")
    except (ValueError, RecursionError) as error:
        raise ContainerError(
            f"the identity file is malformed: {error}",
            path=file,
            remedy="remove the container with 'mlflashpoint clean'",
        ) from None
    if raw.pop("format_version") != FORMAT_VERSION:
        raise ContainerError(
            f"the container is not of format version {FORMAT_VERSION}",
            path=file,
            remedy="use the mlflashpoint release that made it, or remove it with 'mlflashpoint clean'",
        )
    return Container(path=path, **raw)


def _check_kind(config: StoreConfig) -> None:
    path = config.base_container
    with _explained(path):
        kind = filesystem_kind(existing_folder(path))
    if kind not in MEMORY_KINDS and not config.allow_non_tmpfs:
        raise ContainerError(
            f"the base container is on {kind}, not on tmpfs",
            setting=_SETTING,
            value=str(path),
            remedy="choose a folder on tmpfs, for example below /dev/shm, or set MLFLASHPOINT_ALLOW_NON_TMPFS=1",
        )


def _check_identity(identity: Container, config: StoreConfig) -> None:
    if (identity.job_id, identity.uid) != (config.job_id, os.getuid()):
        raise ForeignContainerError(
            f"the base container belongs to job {identity.job_id!r} of user {identity.uid}, this is job "
            f"{config.job_id!r} of user {os.getuid()}",
            setting=_SETTING,
            value=str(config.base_container),
            remedy="give each job its own base container, or remove that one with 'mlflashpoint clean'",
        )


def _check_owner(path: Path) -> None:
    def refuse(kind: type[ContainerError], message: str, remedy: str) -> ContainerError:
        return kind(message, setting=_SETTING, value=str(path), remedy=remedy)

    with _explained(path):
        status, above = os.lstat(path), os.stat(path.parent)
    if stat.S_ISLNK(status.st_mode):
        raise refuse(ContainerError, "the base container is a symbolic link", "give the folder that it points to")
    if not stat.S_ISDIR(status.st_mode):
        raise refuse(ContainerError, "the base container is not a folder", "give a folder, or one that does not exist")
    own = "use a folder of your own, for example a new one below this"
    if status.st_mode & stat.S_ISVTX:
        raise refuse(ContainerError, "the base container is a folder that users share", own)
    if status.st_uid != os.getuid():
        raise refuse(ForeignContainerError, f"the base container belongs to user {status.st_uid}", own)
    # Whoever may rename entries of the parent could put a folder of theirs in the container's place.
    shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    if above.st_uid not in (0, os.getuid()) or (shared and above.st_uid != os.getuid()):
        raise refuse(ContainerError, "other users may replace the base container in its parent folder", own)


def group_that_owns(path: Path) -> str | None:
    """Name of the group if ``path`` is, or would be, a group's folder in a container; else None."""
    return path.name if (path.parent / IDENTITY_FILE).is_file() else None


def _check_free(path: Path, own: Collection[str] = ()) -> None:
    """Whether the folder may become a container: in no other one, and with no other files in it but the job's own."""
    group = group_that_owns(path)
    if group is not None:
        raise ContainerError(
            f"the folder is that of the group {group!r} in another memory container",
            setting=_SETTING,
            value=str(path),
            remedy=f"use a store of that group (group={group!r}) with the container above, or give another folder",
        )
    with _explained(path):
        names = [name for name in os.listdir(path) if not name.startswith(IDENTITY_FILE) and name not in own]
        strange = sorted(name for name in names if not _is_version(path / name))
    # Another rank of this job may have made the identity, and its seat, since we looked.
    if strange and not (path / IDENTITY_FILE).exists():
        raise ContainerError(
            f"the folder holds other files ({strange[0]!r}) and is no memory container",
            setting=_SETTING,
            value=str(path),
            remedy="give a new or empty folder, and see that the job makes nothing else in it",
        )


def _is_version(path: Path) -> bool:
    """Whether it is a version's folder, or that of a group with nothing but versions' folders in it."""
    # A framework may make the folder of a version before the first rank opens the store.
    if CheckpointContainerId.parse_version_container_step(path.name) is not None:
        return True
    inside = os.listdir(path) if path.is_dir() and not path.is_symlink() else []
    return bool(inside) and all(CheckpointContainerId.parse_version_container_step(name) is not None for name in inside)


def _write_identity(container: Container) -> Container:
    """Give the folder its identity unless another process was first; returns the one that holds."""
    file = container.path / IDENTITY_FILE
    temporary = file.with_name(f"{IDENTITY_FILE}.tmp-{secrets.token_hex(8)}")
    raw = {**asdict(container), "format_version": FORMAT_VERSION}
    del raw["path"]
    with _explained(container.path):
        write_file(temporary, json.dumps(raw, sort_keys=True).encode())
        try:
            # A link never replaces: exactly one of the ranks that try at once wins, and its file is whole.
            os.link(temporary, file)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    found = read_container(container.path)
    if found is None:
        raise ContainerError("the container's identity file vanished", path=file, remedy="start the job again")
    return found


def _make_folder(path: Path) -> None:
    with _explained(path):
        path.mkdir(mode=0o700, exist_ok=True)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))


def unusable(path: Path, error: OSError) -> ContainerError:
    """The named error for what the system says of the base container ``path``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(
            "the base container's file system is full", setting=_SETTING, value=str(path), remedy="free memory on it"
        )
    return ContainerError(
        f"the base container can't be used: {error.strerror or error}",
        setting=_SETTING,
        value=str(path),
        remedy="choose a folder that this user may create and write",
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unusable(path, error) from error
