"""The lines of a log of any size, plain or gzip, from a file or standard input, in constant memory."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from mlflashpoint.errors import TimingsError

#: a longer line is cut here: nothing that is looked for is longer, and a torn binary file may have no line end at all
MAX_LINE_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class LineSplitter:
    """Cuts a stream of chunks into lines, for a log that is still growing as well.

    A carriage return ends a line too: that is how a progress bar starts over, and what another process writes
    meanwhile follows the bar on the same line.

    Attributes:
        overlong: number of lines that were cut at ``MAX_LINE_BYTES``.
    """

    def __init__(self) -> None:
        self.overlong = 0
        self._rest = b""
        self._cut = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that ``chunk`` completes, without their ends."""
        *lines, rest = chunk.replace(b"\r", b"\n").split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = b""
            for index, line in enumerate(lines):
                if index == 0 and self._cut:
                    self._cut = False
                    yield line[:MAX_LINE_BYTES]
                elif len(line) > MAX_LINE_BYTES:
                    self.overlong += 1
                    yield line[:MAX_LINE_BYTES]
                elif line:
                    yield line
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            self.overlong += not self._cut
            self._cut = True
            self._rest = self._rest[:MAX_LINE_BYTES]

    def finish(self) -> Iterator[bytes]:
        """The last line, if the log does not end with a line end."""
        if self._rest:
            yield self._rest
        self._rest = b""


def chunks(path: str) -> Iterator[bytes]:
    """The decompressed bytes of ``path`` in pieces; ``-`` is standard input.

    Raises:
        TimingsError: the file can't be read, or is a damaged gzip file.
    """
    try:
        if path == "-":
            yield from _decompressed(cast(BinaryIO, getattr(sys.stdin, "buffer", sys.stdin)))
            return
        if Path(path).is_dir():
            raise TimingsError("a folder is no log", path=path, remedy="name the log files in it")
        with open(path, "rb") as file:
            yield from _decompressed(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TimingsError(
            f"damaged gzip file ({error or type(error).__name__})",
            path=path,
            remedy="read what is left of it with 'zcat FILE | mlflashpoint timings parse ... -'",
        ) from None
    except OSError as error:
        raise TimingsError(f"can't read the log: {error.strerror or error}", path=path) from None


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    buffered = cast(io.BufferedReader, file if hasattr(file, "peek") else io.BufferedReader(cast(io.RawIOBase, file)))
    if buffered.peek(2)[:2] == _GZIP_MAGIC:
        with gzip.GzipFile(fileobj=buffered) as plain:
            while chunk := plain.read(_CHUNK_BYTES):
                yield chunk
        return
    while chunk := buffered.read1(_CHUNK_BYTES):
        yield chunk
