"""What a run has logged so far, on standard error while it runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

from mlflashpoint.timings import console, wording
from mlflashpoint.timings.escapes import visible
from mlflashpoint.timings.lines import LineSplitter
from mlflashpoint.timings.scan import WORDS, LogScan

_PLAIN_EVERY_S = 60.0
_READ_BYTES = 8 << 20


class Progress:
    """Follows a growing log; a line that rewrites itself on a terminal, a line a minute elsewhere.

    Args:
        title: what runs, for example ``[2/4] flashpoint-r1``.
        log: its log file, which exists.
    """

    def __init__(self, title: str, log: Path) -> None:
        self._title = title
        self._scan, self._splitter = LogScan(), LineSplitter(WORDS)
        self._file: BinaryIO = open(log, "rb")  # noqa: SIM115 -- closed by ``close``
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._told = time.monotonic()
        self._width = 0
        console.tell(f"{title}: started, log {log}")

    def watch(self, seconds: float) -> None:
        """Read on, and tell how far the run is after ``seconds``."""
        self._read()
        if self._terminal:
            line = visible(f"{self._title}: {self._state(seconds)}")
            console.report(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        elif time.monotonic() - self._told >= _PLAIN_EVERY_S:
            self._told = time.monotonic()
            console.tell(f"{self._title}: {self._state(seconds)}")

    @property
    def timings(self) -> int:
        """How many timings the log holds, as far as it was read."""
        self._read()
        return self._scan.samples

    def _read(self) -> None:
        chunk = self._file.read(_READ_BYTES)
        if chunk:
            self._scan.feed(self._splitter.feed(chunk))

    def end(self, text: str) -> None:
        """The run has ended; ``text`` says how."""
        if self._terminal and self._width:
            console.report("\r" + " " * self._width + "\r")
        console.tell(f"{self._title}: {text}")

    def close(self) -> None:
        self._file.close()

    def _state(self, seconds: float) -> str:
        saves, last = self._scan.samples, self._scan.last
        clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
        newest = f", last {last[0]} {wording.seconds(last[1])}" if last else ""
        return f"{clock}, {saves} timings{newest}"
