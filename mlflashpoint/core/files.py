"""Small files of the store: read without waiting, written as a whole, sealed with a digest; what their errors mean."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from mlflashpoint.errors import ContainerError, ShardFormatError, StoreFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_SEAL = "digest"
_SETTING = "MLFLASHPOINT_BASE_CONTAINER"
_ANEW = "leave the container of a running job alone; the next start of the job makes it anew"


def open_regular(path: Path, flags: int) -> int:
    """Descriptor of a regular file, made with mode 0600 if ``flags`` ask for that; raises OSError for anything else."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_file(path: Path, most: int) -> bytes:
    """The first ``most`` bytes of a regular file, and one more if there are more; raises OSError."""
    with open(open_regular(path, os.O_RDONLY), "rb") as stream:
        return stream.read(most + 1)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file of mode 0600 that does not exist yet; raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(data)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file of mode 0600 as a whole: readers see the old or the new content; raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        write_file(temporary, data)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def seal(fields: dict[str, Any]) -> bytes:
    """The fields as JSON, with the digest of them (BLAKE2b of 128 bits in hex) under ``digest``."""
    return _dumps({**fields, _SEAL: _digest(fields)})


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The fields that ``seal`` was given.

    Args:
        data: the file's content.
        what: the file, for the error.

    Raises:
        ShardFormatError: it is not JSON, has no seal, or not a bit is as it was.
    """
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ShardFormatError(f"{what} is not JSON: {error}") from None
    if not isinstance(fields, dict) or _SEAL not in fields:
        raise ShardFormatError(f"{what} has no digest of itself")
    digest = fields.pop(_SEAL)
    try:
        intact = digest == _digest(fields)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise ShardFormatError(f"{what} has not the digest that it gives")
    return fields


def file_error(
    message: str, error: OSError, *, path: Path, step: int | None = None, remedy: str = _ANEW
) -> ContainerError:
    """The named error for an operation on one of the store's files, with the remedy that goes with its cause.

    Args:
        message: what can't be done.
        error: why.
        path: the file, or its folder.
        step: training step concerned.
        remedy: against other causes than no room and no permission.
    """
    reason = f"{message}: {error.strerror or error}"
    if error.errno in _FULL:
        return StoreFullError(
            reason, setting=_SETTING, path=path, step=step, remedy="free memory on the store's file system"
        )
    if error.errno in _FORBIDDEN:
        remedy = "let this job's user read and write all of the container"
    return ContainerError(reason, path=path, step=step, remedy=remedy)


def _digest(fields: dict[str, Any]) -> str:
    # Of the standard library: the doctor looks at a container in environments that lack what the store needs.
    return hashlib.blake2b(_dumps(fields), digest_size=16).hexdigest()


def _dumps(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
