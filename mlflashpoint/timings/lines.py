"""The lines of a log of any size, plain or gzip, from a file or standard input, in constant memory."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from mlflashpoint.errors import TimingsError

#: a longer line is cut here: nothing that is looked for is longer, and a torn binary file may have no line end at all
MAX_LINE_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
#: all but printable ASCII and the line end becomes a blank
_BLANKED = bytes(byte if 32 < byte < 127 or byte == 10 else 32 for byte in range(256))
_GZIP_MAGIC = b"\x1f\x8b"


class LineSplitter:
    """Cuts a stream of chunks into lines, for a log that is still growing as well.

    A carriage return ends a line too: that is how a progress bar starts over, and what another process writes
    meanwhile follows the bar on the same line.

    Args:
        words: only lines that contain one of these, or end with something else than printable ASCII, are given out;
            all if it is empty. Looking for a word in a whole chunk is ten times as fast as looking at every line.

    Attributes:
        lines: number of lines seen, given out or not.
        overlong: number of lines that were cut at ``MAX_LINE_BYTES``, as far as they were looked at.
    """

    def __init__(self, words: Sequence[bytes] = ()) -> None:
        self.lines = 0
        self.overlong = 0
        self._words = tuple(words)
        self._rest = b""
        self._cut = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that ``chunk`` completes, without their ends; empty ones are passed over."""
        self.lines += chunk.count(b"\n")
        text = self._rest + chunk.replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        self._rest = text[end:]
        if end:
            counted, self._cut = self._cut, False
            for start, stop in self._places(text[:end]):
                if stop - start > MAX_LINE_BYTES:
                    self.overlong += not (counted and start == 0)
                yield text[start : min(stop, start + MAX_LINE_BYTES)]
        if len(self._rest) > MAX_LINE_BYTES:
            self.overlong += not self._cut
            self._cut = True
            self._rest = self._rest[:MAX_LINE_BYTES]

    def finish(self) -> Iterator[bytes]:
        """The last line, if the log does not end with a line end."""
        rest, self._rest = self._rest, b""
        if rest:
            self.lines += 1
            yield from (rest for _ in self._places(rest + b"\n"))

    def _places(self, text: bytes) -> Iterable[tuple[int, int]]:
        """Where the lines of ``text`` begin and end, which ends with a line end."""
        places = set()
        if not self._words:
            start = 0
            while start < len(text):
                stop = text.index(b"\n", start)
                if stop > start:
                    places.add((start, stop))
                start = stop + 1
        # what ends in a blank or a control character may, for those who take it off, end in a word
        blanked = text.translate(_BLANKED) if self._words else b""
        for word, where in (*((word, text) for word in self._words), (b" \n", blanked)):
            found = where.find(word)
            while found >= 0:
                stop = text.find(b"\n", found)
                places.add((text.rfind(b"\n", 0, found) + 1, stop))
                found = where.find(word, stop)
        return sorted(places)


def chunks(path: str) -> Iterator[bytes]:
    """The decompressed bytes of ``path`` in pieces; ``-`` is standard input.

    Raises:
        TimingsError: the file can't be read, or is a damaged gzip file.
    """
    try:
        if path == "-":
            if sys.stdin is None:
                raise TimingsError("standard input is closed")
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
