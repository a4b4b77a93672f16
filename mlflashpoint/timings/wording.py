"""How the reports write a number, equal in all of them."""

from __future__ import annotations

from mlflashpoint.timings.compare import MODE_SENTENCE, Comparison, Row
from mlflashpoint.timings.samples import OURS

MISSING = "-"
NOT_AVAILABLE = "n/a"


def seconds(value: float | None) -> str:
    """``18.306s``, ``621.0ms`` or ``0.041ms``; ``-`` for None."""
    if value is None:
        return MISSING
    if abs(value) >= 1:
        return f"{value:.3f}s"
    return f"{value * 1e3:.1f}ms" if abs(value) >= 0.01 else f"{value * 1e3:.3f}ms"


def signed(value: float) -> str:
    """A difference of seconds, with its sign."""
    return ("+" if value >= 0 else "-") + seconds(abs(value))


def percent(row: Row) -> str:
    return NOT_AVAILABLE if row.percent is None else f"{row.percent:+.1f}%"


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
    """The lines of the headline, without the rows it is made of; empty if none was asked for."""
    found = comparison.headline
    if found is None:
        return []
    if found.factor is None:
        result = "the substituted save took no measurable time"
    elif found.factor == 0:
        result = "the durable save took no measurable time"
    elif found.factor >= 1:
        result = f"~{found.factor:.3g}x faster, {seconds(found.durable - found.substitute)} off each substituted save"
    else:
        result = (
            f"~{1 / found.factor:.3g}x slower, {seconds(found.substitute - found.durable)} on each substituted save"
        )
    if comparison.invalid:
        return ["Not to be relied on: " + "; ".join(comparison.invalid) + ".", result, MODE_SENTENCE]
    return [result, MODE_SENTENCE]


def explanation(comparison: Comparison) -> list[str]:
    """How to read the table."""
    first = comparison.skipped_first
    lines = [
        "Each save counts once, with the time of its slowest rank. Delta: candidate's mean minus baseline's.",
        f"Interval: 95 % bootstrap of the delta (seed {comparison.seed})."
        + (f" The first {first} saves of each timer and run are left out." if first else ""),
    ]
    ours = [row.timer.startswith(OURS) for row in comparison.rows]
    if any(ours) and not all(ours):
        names = " and ".join(f"{prefix}*" for prefix in OURS)
        lines.append(f"{names} measure the saves of the other timers from within: do not add them up.")
    return lines
