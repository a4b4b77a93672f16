"""The two drawings of the report, as SVG that takes its colours from the page's style sheet."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from mlflashpoint.timings import stats, wording
from mlflashpoint.timings.compare import Comparison
from mlflashpoint.timings.escapes import markup as escape
from mlflashpoint.timings.samples import Sample, TimingSet
from mlflashpoint.timings.scale import Scale

_WIDTH = 960
#: dots of one series; of more saves the slowest of every so many is drawn
MAX_DOTS = 400
_SHAPES = ("circle", "diamond", "square", "triangle")
_CORNERS = {
    "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    "square": ((-1.05, -1.05), (1.05, -1.05), (1.05, 1.05), (-1.05, 1.05)),
    "triangle": ((0, -1.25), (1.25, 1), (-1.25, 1)),
}
_GOLDEN = 0.618034
#: height of a series' name and mean beside the drawing, and of the drawing of an arm that has few series
_LABEL, _PANEL = 34, 176
#: width of such a name
_NAME = 276


def stall_over_time(comparison: Comparison) -> str:
    """Seconds of every save over the training step, one panel per arm on common axes."""
    arms = (comparison.baseline, comparison.candidate)
    timers = [row.timer for row in comparison.rows if not row.background]
    samples = [sample for arm in arms for timer in timers for sample in arm.timers.get(timer, ())]
    if not samples:
        return ""
    by_step = all(sample.step is not None for sample in samples)
    across = Scale.of_steps([_place(sample, by_step) for sample in samples])
    upward = Scale.of_times([sample.seconds for sample in samples])
    # with the names of all series beside it; the arms are equally high, for one is read against the other
    most = max(sum(timer in arm.timers for timer in timers) for arm in arms)
    left, right, top, height, gap = 66, 26 + _NAME, 34, max(_PANEL, (most - 1) * _LABEL), 46
    inner = _WIDTH - left - right
    parts = []
    for index, arm in enumerate(arms):
        y0 = top + index * (height + gap)

        def y(seconds: float, y0: int = y0) -> float:
            return y0 + height * (1 - upward.place(seconds))

        parts.append(_text(left, y0 - 14, arm.label, f"arm arm{index}"))
        for tick in upward.ticks:
            parts.append(_line(left, y(tick), left + inner, y(tick), "grid"))
            parts.append(_text(left - 10, y(tick) + 4, _tick(tick), "tick end"))
        for tick in across.ticks:
            x = left + inner * across.place(tick)
            parts.append(_line(x, y0 + height, x, y0 + height + 5, "axis"))
            if index == len(arms) - 1:
                parts.append(_text(x, y0 + height + 20, f"{tick:,.0f}", "tick middle"))
        parts.append(_line(left, y0 + height, left + inner, y0 + height, "axis"))
        labels = []
        for shape, timer in enumerate(timers):
            series = arm.timers.get(timer, ())
            if not series:
                continue
            centre = stats.mean([sample.seconds for sample in series])
            parts.append(_line(left, y(centre), left + inner, y(centre), f"mean arm{index}"))
            for sample in _thinned(series):
                x = left + inner * across.place(_place(sample, by_step))
                title = f"{arm.label}, {timer}: {wording.seconds(sample.seconds)}{_where(sample)}"
                parts.append(_mark(shape, x, y(sample.seconds), index, title))
            labels.append((y(centre), shape, timer, centre))
        if not labels:
            parts.append(_text(left + inner / 2, y0 + height / 2, "no save in this arm", "tick middle"))
        parts += _series_labels(labels, left + inner + 22, y0, height, index)
    bottom = top + 2 * height + gap + 42
    name = "training step" if by_step else "save, in the order of the log"
    parts.append(_text(left + inner / 2, bottom - 2, name, "tick middle"))
    return _svg(parts, bottom + 8, "Stall per save over time, for both arms")


def distributions(comparison: Comparison) -> str:
    """Every timer's samples of both arms on one time axis: dots, quartiles, median."""
    arms = (comparison.baseline, comparison.candidate)
    values = [s.seconds for arm in arms for row in comparison.rows for s in arm.timers.get(row.timer, ())]
    if not values:
        return ""
    across = Scale.of_times(values)
    left, right, row_height = 210, 110, 34
    inner = _WIDTH - left - right

    def x(seconds: float) -> float:
        return left + inner * across.place(seconds)

    parts = [_text(left + inner + 14, 24, "median", "tick")]
    y = 8
    for row in comparison.rows:
        role = wording.role(row)
        parts.append(_text(0, y + 16, _short(row.timer, 640) + (f" ({role})" if role else ""), "timer"))
        y += 26
        for index, arm in enumerate(arms):
            middle = y + row_height / 2
            parts.append(_text(left - 14, middle + 4, _short(arm.label, 194), f"arm end arm{index}"))
            parts.append(_line(left, middle, left + inner, middle, "grid"))
            series = arm.timers.get(row.timer, ())
            if series:
                parts += _box([sample.seconds for sample in series], x, middle, index)
                for place, sample in enumerate(_thinned(series)):
                    shift = ((place * _GOLDEN) % 1 - 0.5) * 16
                    title = f"{arm.label}, {row.timer}: {wording.seconds(sample.seconds)}{_where(sample)}"
                    parts.append(_mark(0, x(sample.seconds), middle + shift, index, title, 3.2))
                half = wording.seconds(stats.median([sample.seconds for sample in series]))
                parts.append(_text(left + inner + 14, middle + 4, half, "value"))
            else:
                parts.append(_text(left + 10, middle - 5, "no such save in this arm", "tick"))
            y += row_height
        y += 12
    for tick in across.ticks:
        parts.insert(0, _line(x(tick), 8, x(tick), y, "grid"))
        parts.append(_text(x(tick), y + 16, _tick(tick), "tick middle"))
    return _svg(parts, y + 26, "Distribution of the times of each timer, for both arms")


def is_logarithmic(comparison: Comparison) -> bool:
    """Whether the drawings' time axes are logarithmic."""
    arms = (comparison.baseline, comparison.candidate)
    return Scale.of_times([s.seconds for arm in arms for series in arm.timers.values() for s in series]).logarithmic


def is_thinned(timings: TimingSet) -> bool:
    """Whether there are too many saves to draw each."""
    return any(len(series) > MAX_DOTS for series in timings.timers.values())


def _place(sample: Sample, by_step: bool) -> int:
    return sample.step if by_step and sample.step is not None else sample.order


def _where(sample: Sample) -> str:
    step = "" if sample.step is None else f", step {sample.step}"
    return f"{step}, run {sample.run + 1}"


def _thinned(series: Sequence[Sample]) -> Iterator[Sample]:
    size = -(-len(series) // MAX_DOTS)
    for start in range(0, len(series), size):
        yield max(series[start : start + size], key=lambda sample: sample.seconds)


def _series_labels(
    labels: list[tuple[float, int, str, float]], x: float, y0: float, height: float, arm: int
) -> Iterator[str]:
    """The series' names beside their means, pushed apart where they would overlap."""
    labels.sort()
    places: list[float] = []
    for wanted, *_ in labels:
        places.append(max(wanted, places[-1] + _LABEL) if places else wanted)
    overshoot = (places[-1] - (y0 + height)) if places else 0.0
    for index in range(len(places) - 1, -1, -1):
        limit = y0 + height - (len(places) - 1 - index) * _LABEL
        if overshoot > 0:
            places[index] = min(places[index], limit)
    for y, (_, shape, timer, centre) in zip(places, labels, strict=True):
        yield _mark(shape, x - 9, y - 4, arm, timer)
        yield _text(x + 4, y, _short(timer, _NAME), "series", timer)
        yield _text(x + 4, y + 15, f"mean {wording.seconds(centre)}", "tick")


def _box(values: list[float], x: object, middle: float, arm: int) -> Iterator[str]:
    assert callable(x)
    low, high = x(stats.quantile(values, 0.25)), x(stats.quantile(values, 0.75))
    yield _line(x(min(values)), middle, x(max(values)), middle, f"whisker arm{arm}")
    width = max(high - low, 2)
    yield f'<rect class="box arm{arm}" x="{low:.1f}" y="{middle - 11:.1f}" width="{width:.1f}" height="22" rx="3"/>'
    half = x(stats.median(values))
    yield _line(half, middle - 13, half, middle + 13, f"median arm{arm}")


def _mark(series: int, x: float, y: float, arm: int, title: str, size: float = 4.4) -> str:
    shape = _SHAPES[series % len(_SHAPES)]
    # the third and later series are hollow: a timer can lie inside another one and have nearly its value
    style = f"dot arm{arm}" + (" hollow" if series >= 2 else "")
    if shape == "circle":
        form, name = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"', "circle"
    else:
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in _CORNERS[shape])
        form, name = f'<polygon points="{points}"', "polygon"
    return f'{form} class="{style}"><title>{escape(title)}</title></{name}>'


def _tick(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _short(text: str, pixels: float) -> str:
    """``text``, or so much of it as has room; by the letters of a wide font, bold, for the reader's is not known."""
    if sum(map(_width, text)) <= pixels:
        return text
    room, kept = pixels - _width("…"), 0
    for letter in text:
        room -= _width(letter)
        if room < 0:
            break
        kept += 1
    return text[:kept] + "…"


def _width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF" or letter in "mwMW@%…":
        return 14.0
    return 5.8 if letter in "fijlrt.,:;|'![]()-/ " else 10.5 if letter.isupper() else 8.8


def _text(x: float, y: float, text: str, style: str, title: str = "") -> str:
    hint = f"<title>{escape(title)}</title>" if title and title != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(text)}{hint}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _svg(parts: Sequence[str], height: float, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(name)}">' + "".join(parts) + "</svg>"
    )
