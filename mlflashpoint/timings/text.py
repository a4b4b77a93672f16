"""The comparison as plain text, for a terminal or a job's log."""

from __future__ import annotations

from mlflashpoint.timings import wording
from mlflashpoint.timings.compare import Comparison, Row, Summary
from mlflashpoint.timings.escapes import visible

_HEAD = ("timer", "arm", "n", "mean", "median", "p95", "delta of the means", "95% interval")


def render(comparison: Comparison) -> str:
    """A table with two lines per timer, what to think of it, and the headline if one was asked for."""
    lines: list[tuple[str, ...]] = [_HEAD]
    for row in comparison.rows:
        lines += _row(row, visible(comparison.baseline.label), visible(comparison.candidate.label))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    numeric = range(2, 6)

    def joined(line: tuple[str, ...]) -> str:
        cells = [
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    table = [joined(line) for line in lines]
    table.insert(1, "-" * max(map(len, table)))
    parts = ["\n".join(table), "\n".join(wording.explanation(comparison)), _verdict(comparison)]
    if comparison.headline is not None:
        parts.append(_headline(comparison))
    return "\n\n".join(parts) + "\n"


def _row(row: Row, one: str, other: str) -> list[tuple[str, ...]]:
    role = wording.role(row)
    name = visible(row.timer) + (f" ({role})" if role else "")
    change = wording.delta(row)
    if row.delta is not None:
        change += f" ({wording.percent(row)}, {wording.factor(row)})"
    return [
        (name, one, *_numbers(row.baseline), "", ""),
        ("", other, *_numbers(row.candidate), change, wording.interval(row)),
    ]


def _numbers(summary: Summary | None) -> tuple[str, ...]:
    if summary is None:
        return (wording.MISSING,) * 4
    return str(summary.n), *(wording.seconds(value) for value in (summary.mean, summary.median, summary.p95))


def _verdict(comparison: Comparison) -> str:
    lines = [comparison.control]
    lines += [f"INVALID: {reason}." for reason in comparison.invalid]
    lines += [f"Note: {caution}" for caution in comparison.cautions]
    return "\n".join(map(visible, lines))


def _headline(comparison: Comparison) -> str:
    found = comparison.headline
    assert found is not None
    rows = (
        (
            visible(comparison.baseline.label),
            visible(found.durable_timer),
            wording.seconds(found.durable),
            "what a checkpoint used to cost",
        ),
        (
            visible(comparison.candidate.label),
            visible(found.substitute_timer),
            wording.seconds(found.substitute),
            "what the substituted checkpoint costs now",
        ),
    )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{arm.ljust(widths[0])}  {timer.ljust(widths[1])}  {value.rjust(widths[2])}  <- {meaning}"
        for arm, timer, value, meaning in rows
    ]
    return "\n".join([*lines, *map(visible, wording.headline(comparison))])
