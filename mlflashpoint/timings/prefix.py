"""Who wrote a line: takes off what launchers, log collectors and terminals put around a process's own text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RAY_REPEATED = re.compile(r" ?\[repeated (\d+)x across cluster\].*$")

#: what may precede the text, in any order and several times; a group names the writer, the rest only tells the time
_PREFIX = re.compile(
    r" *(\d{1,7}): "  # srun --label
    r"|\[([A-Za-z_]+\d+)\]:"  # torchrun --tee
    r"|\(([^()]{0,200}\bpid=\d+[^()]{0,200})\) "  # Ray, SkyPilot
    r"|\[(pod/[^\]\s]{1,300})\] "  # kubectl logs --prefix
    r"|([\w.-]{1,100}) +\| "  # docker compose
    # kubectl logs --timestamps, and the file of a container runtime (CRI)
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d) (?:(?:stdout|stderr) [FP] )?"
)
_MOST = 6
_DECODER = json.JSONDecoder()
_LINE_END = re.compile("[\r\n]")
#: where a record of JSON has the text: Docker's, and those of loggers that write JSON
KEYS = ("log", "msg", "message", "text")


class Line(NamedTuple):
    """A line as its process wrote it.

    Attributes:
        stream: what told the writer apart from others, empty if nothing did.
        text: the line itself, its indentation kept.
        repeated: how many further processes' lines Ray has left out in favour of this one.
    """

    stream: str
    text: str
    repeated: int


def strip(raw: bytes) -> Line:
    """``raw`` (one line, no line end) without prefixes, colours and control characters; the first line of several."""
    return next(lines(raw), Line("", "", 0))


def lines(raw: bytes) -> Iterator[Line]:
    """All lines of a process in ``raw``: a record of JSON can hold several."""
    text = raw.decode("utf-8", "replace")
    if not text.isprintable():
        text = _ANSI.sub("", text)
    text = text.rstrip()
    repeated = 0
    if "across cluster]" in text and (more := _RAY_REPEATED.search(text)):
        repeated = min(int(more[1][:9]), 10**6)
        text = text[: more.start()]
    return _lines(text, (), repeated)


def _lines(text: str, writers: tuple[str, ...], repeated: int) -> Iterator[Line]:
    names = list(writers)
    place = 0
    for _ in range(_MOST):
        found = _PREFIX.match(text, place)
        if found is None:
            break
        place = found.end()
        if found.lastindex:
            names.append(found[found.lastindex])
    if text.startswith("{", place) and len(names) <= _MOST and (inner := _messages(text, place)):
        for line in inner:
            # another collector can have wrapped it before
            yield from _lines(line, (*names, ""), repeated)
        return
    yield Line("/".join(filter(None, names)), text[place:], repeated)


def _messages(text: str, place: int) -> list[str]:
    """The lines that the records of JSON in ``text`` hold, which can stand one behind the other; empty for others."""
    found: list[str] = []
    while place < len(text):
        try:
            record, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        values = [record[key] for key in KEYS if key in record] if isinstance(record, dict) else []
        message = next((value for value in values if isinstance(value, str)), None)
        if message is None:
            break
        place = end
        found += filter(None, (_ANSI.sub("", line).rstrip() for line in _LINE_END.split(message)))
    rest = text[place:].strip()
    return [*found, rest] if found and rest else found
