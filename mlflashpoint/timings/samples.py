"""The timings of one label: what ``timings parse`` writes and ``timings compare`` reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.arguments import is_label

FORMAT = "mlflashpoint timings"
VERSION = 1
UNIT = "seconds, maximum across ranks"
#: timers that block nothing: the training goes on meanwhile
BACKGROUND = "flashpoint-commit"
#: timers out of our own records; they measure the same saves as a framework's timers, from within
OURS = ("flashpoint-", "observed-")
_MAX_BYTES = 1 << 30
#: no time of a log is longer, and sums of squares of it can be told
_MOST_SECONDS = 1e16
_MOST = 1 << 53


@dataclass(frozen=True)
class Sample:
    """One checkpoint.

    Attributes:
        seconds: how long the slowest rank took.
        run: index of the run that it belongs to, from 0.
        order: its place among all samples of the run.
        step: training step, None if the log does not tell.
        least: seconds of the fastest rank, None if the log does not tell.
        ranks: number of ranks that told of it, None where one line speaks for all.
    """

    seconds: float
    run: int
    order: int
    step: int | None = None
    least: float | None = None
    ranks: int | None = None


@dataclass(frozen=True)
class Source:
    """A log that was read, with what was left out of it."""

    path: str
    lines: int
    samples: int
    duplicates: int = 0
    torn: int = 0
    overlong: int = 0
    collapsed: int = 0


@dataclass(frozen=True)
class TimingSet:
    """All samples of one label.

    Attributes:
        label: name of the arm.
        timers: samples by timer name, in the order of the logs.
        job: facts that tell one job from another (``frameworks``, ``parameters``, ``world_size``), sorted lists.
        failed, skipped: saves by timer that went wrong, or were left out, on some rank; they are no samples.
        sources: the logs.
        notes: what a reader of the numbers has to know.
    """

    label: str
    timers: Mapping[str, tuple[Sample, ...]]
    job: Mapping[str, list[Any]] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def without_first(self, count: int) -> TimingSet:
        """The same without the first ``count`` samples of every timer in every run."""
        kept = {}
        for timer, samples in self.timers.items():
            seen: dict[int, int] = {}
            rest = []
            for sample in samples:
                seen[sample.run] = seen.get(sample.run, 0) + 1
                if seen[sample.run] > count:
                    rest.append(sample)
            if rest:
                kept[timer] = tuple(rest)
        return TimingSet(self.label, kept, self.job, self.failed, self.skipped, self.sources, self.notes)

    def to_json(self) -> str:
        def plain(sample: Sample) -> dict[str, Any]:
            return {name: value for name, value in asdict(sample).items() if value is not None}

        document = {
            "format": FORMAT,
            "version": VERSION,
            "label": self.label,
            "unit": UNIT,
            "job": dict(self.job),
            "sources": [asdict(source) for source in self.sources],
            "timers": {timer: [plain(sample) for sample in samples] for timer, samples in self.timers.items()},
            "failed": dict(self.failed),
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, path: object = None) -> TimingSet:
        """Read what ``to_json`` wrote.

        Raises:
            TimingsError: it is cut off, no such file, or holds impossible numbers.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            known = isinstance(error, json.JSONDecodeError)
            reason = " ".join(str(error).split())[:100] if known else "a number or the nesting in it has no end"
            raise TimingsError(f"not a whole JSON file ({reason})", path=path, remedy=_PARSE) from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise TimingsError("not a result of 'timings parse'", path=path, remedy=_PARSE)
        try:
            for name, needed in (("version", VERSION), ("unit", UNIT)):
                found = _member(document, name)
                if type(found) is not type(needed) or found != needed:
                    raise TimingsError(f"format {name} {_shown(found)} is not {needed!r}", path=path, remedy=_PARSE)
            return cls(
                label=_label(_member(document, "label")),
                timers={timer: _samples(rows, timer) for timer, rows in _members(document, "timers")},
                job={name: _facts(values) for name, values in _members(document, "job")},
                failed={
                    timer: _whole(count, f"failed saves of {timer}") for timer, count in _members(document, "failed")
                },
                skipped={
                    timer: _whole(count, f"skipped saves of {timer}") for timer, count in _members(document, "skipped")
                },
                sources=tuple(_source(source) for source in _list(_member(document, "sources"), "sources")),
                notes=tuple(_text(note, "a note") for note in _list(_member(document, "notes"), "notes")),
            )
        except ValueError as error:
            raise TimingsError(f"damaged result of 'timings parse': {error}", path=path, remedy=_PARSE) from None

    @classmethod
    def read(cls, path: Path) -> TimingSet:
        """Read a file, ``-`` for standard input; raises TimingsError as ``from_json`` does, or if it can't be read."""
        try:
            data = _bytes(path)
        except OSError as error:
            raise TimingsError(f"can't read the timings: {error.strerror or error}", path=path) from None
        if len(data) > _MAX_BYTES:
            raise TimingsError("too large for a result of 'timings parse'", path=path)
        try:
            return cls.from_json(data.decode("utf-8-sig"), path)
        except UnicodeDecodeError:
            raise TimingsError("not a result of 'timings parse'", path=path, remedy=_PARSE) from None


def _bytes(path: Path) -> bytes:
    if str(path) != "-":
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES + 1)
    if sys.stdin is None:
        raise TimingsError("standard input is closed")
    return sys.stdin.buffer.read(_MAX_BYTES + 1)


_PARSE = "make it with 'mlflashpoint timings parse'"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {_shown(value)} is no object")
    return value


def _member(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"{name!r} is missing")
    return fields[name]


def _members(fields: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return list(_object(_member(fields, name), name).items())


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: {_shown(value)} is no list")
    return value


def _label(value: Any) -> str:
    if not is_label(_text(value, "label")):
        raise ValueError(f"{_shown(value)} is no label")
    return str(value)


def _samples(rows: Any, timer: str) -> tuple[Sample, ...]:
    if not timer or not _list(rows, timer):
        raise ValueError("a timer without samples" if timer else "a timer without a name")
    samples = []
    for row in rows:
        fields = _object(row, timer)
        step, least, ranks = fields.get("step"), fields.get("least"), fields.get("ranks")
        seconds = _seconds(_member(fields, "seconds"), timer)
        if least is not None and _seconds(least, timer) > seconds:
            raise ValueError(f"{timer}: {least!r} is no minimum of {seconds!r}")
        samples.append(
            Sample(
                seconds=seconds,
                run=_whole(_member(fields, "run"), "run"),
                order=_whole(_member(fields, "order"), "order"),
                step=None if step is None else _whole(step, "step"),
                least=None if least is None else _seconds(least, timer),
                ranks=None if ranks is None else _whole(ranks, "ranks"),
            )
        )
    return tuple(samples)


def _facts(values: Any) -> list[Any]:
    for value in _list(values, "job"):
        if type(value) is not int and not isinstance(value, str):
            raise ValueError(f"{_shown(value)} is no fact of a job")
    return list(values)


def _source(fields: Any) -> Source:
    given = _object(fields, "sources")
    for name in ("path", "lines", "samples"):
        _member(given, name)
    for name, value in given.items():
        if name not in Source.__dataclass_fields__:
            raise ValueError(f"a log has no {_shown(name)}")
        _text(value, name) if name == "path" else _whole(value, name)
    return Source(**given)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what}: {_shown(value)} is no text")
    return value


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{what}: {_shown(value)} is no count")
    return value


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST_SECONDS:
        raise ValueError(f"{what}: {_shown(value)} is no time in seconds")
    # no timer is finer; what is smaller could not be drawn
    return round(float(value), 9)
