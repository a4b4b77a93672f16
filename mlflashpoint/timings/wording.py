"""How the reports write a number, equal in all of them."""

from __future__ import annotations

from mlflashpoint.timings import stats
from mlflashpoint.timings.compare import MODE_SENTENCE, Comparison, Row
from mlflashpoint.timings.samples import OURS

MISSING = "-"
NOT_AVAILABLE = "n/a"


def seconds(value: float | None) -> str:
    """``18.306s``, ``621.0ms`` or ``0.041ms``; ``-`` for None."""
    if value is None:
        return MISSING
    # the rounded value tells the form, or there would be 1000.0ms
    for digits, limit in ((3, 10), (1, 1000)):
        milliseconds = stats.rounded(value * 1e3, digits)
        if abs(milliseconds) < limit:
            return f"{milliseconds:.{digits}f}ms"
    return f"{value:.3f}s"


def signed(value: float) -> str:
    """A difference of seconds, with its sign."""
    return ("-" if stats.rounded(value * 1e3, 3) < 0 else "+") + seconds(abs(value))


def percent(row: Row) -> str:
    return NOT_AVAILABLE if row.percent is None else f"{stats.rounded(row.percent, 1):+.1f}%"


def factor(row: Row) -> str:
    return NOT_AVAILABLE if row.factor is None else f"{row.factor:.2f}x"


def delta(row: Row) -> str:
    return NOT_AVAILABLE if row.delta is None else signed(row.delta)


def interval(row: Row) -> str:
    if row.interval is None:
        return NOT_AVAILABLE
    return f"{signed(row.interval[0])} to {signed(row.interval[1])}"


def role(row: Row) -> str:
    """What kind of row it is, in a word or two; empty for most."""
    return "control" if row.control else "background" if row.background else ""


def headline(comparison: Comparison) -> list[str]:
    """The sentences of the headline, without the rows it is made of; empty if none was asked for."""
    found = comparison.headline
    if found is None:
        return []
    factor, off = found.factor, found.durable - found.substitute
    if factor is None:
        result = "The substituted save took no measurable time."
    elif factor == 0:
        result = "The durable save took no measurable time."
    elif abs(off) < 0.005 * found.durable:
        result = "The substituted save takes as long as the durable one, to within 0.5 %."
    elif factor > 1:
        result = f"~{_times(factor)} faster, {seconds(off)} off each substituted save."
    else:
        result = f"~{_times(1 / factor)} slower, {seconds(-off)} on each substituted save."
    if comparison.invalid:
        return ["Not to be relied on: " + "; ".join(comparison.invalid) + ".", result, MODE_SENTENCE]
    return [result, MODE_SENTENCE]


def _times(factor: float) -> str:
    return f"{factor:.3g}x" if factor < 999.5 else f"{factor:,.0f}x"


def explanation(comparison: Comparison) -> list[str]:
    """How to read the table."""
    first = comparison.skipped_first
    skipped = f" The first {first} saves of each timer and run are left out." if first > 1 else ""
    if first == 1:
        skipped = " The first save of each timer and run is left out."
    lines = [
        "Each save counts once, with the time of its slowest rank. Delta: candidate's mean minus baseline's.",
        f"Interval: 95 % bootstrap of the delta (seed {comparison.seed}).{skipped}",
    ]
    ours = [row.timer.startswith(OURS) for row in comparison.rows]
    if any(ours) and not all(ours):
        names = " and ".join(f"{prefix}*" for prefix in OURS)
        lines.append(f"{names} measure the saves of the other timers from within: do not add them up.")
    return lines
