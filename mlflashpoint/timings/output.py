"""Result files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
from pathlib import Path

from mlflashpoint.errors import TimingsError

_DESCRIPTORS = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd")
_MOST_LINKS = 40


def check_writable(path: Path) -> None:
    """Find out before any work is done that ``path`` can't be written.

    Raises:
        TimingsError: its folder is missing or read-only, it is a folder itself, or no name of a file at all.
    """
    if _descriptor(path) is not None:
        return
    status = _status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise TimingsError("a folder is in the place of the output file", path=path)
    place = Path(os.path.realpath(path))
    if status is not None and not stat.S_ISREG(status.st_mode):
        needed = place
    else:
        needed = place.parent
        if not needed.is_dir():
            raise TimingsError("the output's folder does not exist", path=path, remedy=f"mkdir -p {needed}")
        if status is not None and not os.access(place, os.W_OK):
            needed = place
    if not os.access(needed, os.W_OK):
        raise TimingsError("no permission to write the output", path=path)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside the file that ``path`` leads to and rename it there.

    Symbolic links are followed and stay what they are; devices, pipes and open files of this process (``/dev/stdout``)
    are written to directly. What is no Unicode is escaped.

    Raises:
        TimingsError: the file can't be written; what was there before is untouched.
    """
    data = text.encode("utf-8", "backslashreplace")
    descriptor, status = _descriptor(path), _status(path)
    try:
        if descriptor is not None:
            if sys.stdout is not None:
                sys.stdout.flush()
            with open(os.dup(descriptor), "wb") as file:
                file.write(data)
        elif status is not None and not stat.S_ISREG(status.st_mode):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise TimingsError(f"can't write the output: {error.strerror or error}", path=path) from None


def _replace(place: Path, data: bytes) -> None:
    temporary = place.with_name(f".mlflashpoint-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _status(path: Path) -> os.stat_result | None:
    """What ``path`` leads to, None if there is nothing yet."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TimingsError(f"can't write the output: {error.strerror or error}", path=path) from None


def _descriptor(path: Path) -> int | None:
    """The number behind ``/dev/stdout`` or ``/dev/fd/3``: opened by name, a file would be cut to nothing first."""
    place = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(place)
        folder = os.path.realpath(folder)
        if (found := _DESCRIPTORS.fullmatch(folder)) and int(found[1]) == os.getpid() and name.isdecimal():
            return int(name)
        try:
            place = os.path.join(folder, os.readlink(os.path.join(folder, name)))
        except OSError:
            return None
    return None
