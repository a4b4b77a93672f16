"""Result files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from mlflashpoint.errors import TimingsError


def check_writable(path: Path) -> None:
    """Find out before any work is done that ``path`` can't be written.

    Raises:
        TimingsError: its folder is missing or read-only, or it is a folder itself.
    """
    if path.is_dir():
        raise TimingsError("a folder is in the place of the output file", path=path)
    folder = path.parent
    if not folder.is_dir():
        raise TimingsError("the output's folder does not exist", path=path, remedy=f"mkdir -p {folder}")
    if not os.access(folder if not path.exists() else path, os.W_OK):
        raise TimingsError("no permission to write the output", path=path)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename it there; devices and pipes are written to directly.

    Raises:
        TimingsError: the file can't be written; what was there before is untouched.
    """
    data = text.encode()
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise TimingsError(f"can't write the output: {error.strerror or error}", path=path) from None
