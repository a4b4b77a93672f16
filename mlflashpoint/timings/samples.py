"""The timings of one label: what ``timings parse`` writes and ``timings compare`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlflashpoint.errors import TimingsError

FORMAT = "mlflashpoint timings"
VERSION = 1
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
            "unit": "seconds, maximum across ranks",
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
            reason = " ".join(str(error).split())[:100]
            raise TimingsError(f"not a whole JSON file ({reason})", path=path, remedy=_PARSE) from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise TimingsError("not a result of 'timings parse'", path=path, remedy=_PARSE)
        if document.get("version") != VERSION:
            raise TimingsError(f"format version {document.get('version')!r} is not {VERSION}", path=path, remedy=_PARSE)
        try:
            return cls(
                label=_text(document["label"]),
                timers={_text(timer): _samples(rows) for timer, rows in document["timers"].items()},
                job={_text(name): _facts(values) for name, values in document["job"].items()},
                failed={_text(timer): _whole(count) for timer, count in document["failed"].items()},
                skipped={_text(timer): _whole(count) for timer, count in document["skipped"].items()},
                sources=tuple(_source(source) for source in document["sources"]),
                notes=tuple(_text(note) for note in _list(document["notes"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TimingsError(
                f"damaged result of 'timings parse' ({type(error).__name__}: {error})", path=path, remedy=_PARSE
            ) from None

    @classmethod
    def read(cls, path: Path) -> TimingSet:
        """Read a file; raises TimingsError as ``from_json`` does, or if it can't be read."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise TimingsError("too large for a result of 'timings parse'", path=path)
            return cls.from_json(path.read_text(encoding="utf-8"), path)
        except UnicodeDecodeError:
            raise TimingsError("not a result of 'timings parse'", path=path, remedy=_PARSE) from None
        except OSError as error:
            raise TimingsError(f"can't read the timings: {error.strerror or error}", path=path) from None


_PARSE = "make it with 'mlflashpoint timings parse'"


def _samples(rows: Any) -> tuple[Sample, ...]:
    if not isinstance(rows, list) or not rows:
        raise ValueError("a timer without samples")
    samples = []
    for row in rows:
        step, least, ranks = row.get("step"), row.get("least"), row.get("ranks")
        seconds = _seconds(row["seconds"])
        if least is not None and _seconds(least) > seconds:
            raise ValueError(f"{least!r} is no minimum of {seconds!r}")
        samples.append(
            Sample(
                seconds=seconds,
                run=_whole(row["run"]),
                order=_whole(row["order"]),
                step=None if step is None else _whole(step),
                least=None if least is None else _seconds(least),
                ranks=None if ranks is None else _whole(ranks),
            )
        )
    return tuple(samples)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} in the place of a list")
    return value


def _facts(values: Any) -> list[Any]:
    for value in _list(values):
        if type(value) is not int and not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} is no fact of a job")
    return list(values)


def _source(fields: Any) -> Source:
    source = Source(**fields)
    for name, value in asdict(source).items():
        _text(value) if name == "path" else _whole(value)
    return source


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("a number is no count")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST_SECONDS:
        raise ValueError("a number is no time")
    # no timer is finer; what is smaller could not be drawn
    return round(float(value), 9)
