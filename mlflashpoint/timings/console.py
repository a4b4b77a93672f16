"""Standard output and standard error, which may be closed, full, or unable to show a character."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.escapes import visible


def show(text: str) -> None:
    """Write lines to standard output. A reader that stops early (head, less) is no error.

    Raises:
        TimingsError: standard output is closed, or takes no more.
    """
    if sys.stdout is None:
        raise TimingsError("standard output is closed", remedy="redirect it to a file")
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise TimingsError(f"can't write to standard output: {error.strerror or error}") from None


def tell(line: str) -> None:
    """Write one line to standard error, if anybody is there to read it."""
    report(visible(line) + "\n")


def report(text: str) -> None:
    """Write to standard error as it is; what comes from a log has to be made visible before."""
    if sys.stderr is None:
        return
    try:
        _write(sys.stderr, text)
    except OSError:
        _silence(sys.stderr)


def _write(stream: TextIO, text: str) -> None:
    # a terminal that can't show a character gets another one, not an exception
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def _silence(stream: TextIO) -> None:
    """Python would write what is left in the buffer once more, and complain, when it ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
