"""The comparison as Markdown, for an issue or a report."""

from __future__ import annotations

from mlflashpoint.timings import wording
from mlflashpoint.timings.compare import Comparison, Row, Summary
from mlflashpoint.timings.escapes import visible


def render(comparison: Comparison) -> str:
    """One table row per timer and arm, then what to think of it."""
    lines = [
        "| timer | arm | n | mean | median | p95 | delta | percent | factor | 95 % interval |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in comparison.rows:
        role = wording.role(row)
        # a bar ends the cell also where it is code
        name = _code(row.timer).replace("|", "\\|") + (f" ({role})" if role else "")
        lines.append(_line(name, comparison.baseline.label, row.baseline, ("", "", "", "")))
        lines.append(_line("", comparison.candidate.label, row.candidate, _change(row)))
    parts = ["\n".join(lines), " ".join(wording.explanation(comparison)), _cell(comparison.control)]
    parts += [f"**Invalid:** {_cell(reason)}." for reason in comparison.invalid]
    parts += ["\n".join(f"- {_cell(caution)}" for caution in comparison.cautions)] if comparison.cautions else []
    found = comparison.headline
    if found is not None:
        result, *rest = wording.headline(comparison)
        parts.append(
            f"**{_cell(comparison.baseline.label)}** {_code(found.durable_timer)} {wording.seconds(found.durable)}, "
            f"**{_cell(comparison.candidate.label)}** {_code(found.substitute_timer)} "
            f"{wording.seconds(found.substitute)}: **{_cell(result)}** {' '.join(map(_cell, rest))}"
        )
    return "\n\n".join(parts) + "\n"


def _change(row: Row) -> tuple[str, str, str, str]:
    return wording.delta(row), wording.percent(row), wording.factor(row), wording.interval(row)


def _line(name: str, arm: str, summary: Summary | None, change: tuple[str, ...]) -> str:
    if summary is None:
        numbers: tuple[str, ...] = (wording.MISSING,) * 4
    else:
        numbers = (str(summary.n), *map(wording.seconds, (summary.mean, summary.median, summary.p95)))
    return "| " + " | ".join((name, _cell(arm), *numbers, *change)) + " |"


def _code(text: str) -> str:
    """Text of a log as code, where nothing is markup but the mark that ends it."""
    return f"`{visible(text).replace('`', chr(39))}`"


def _cell(text: str) -> str:
    """Text of a log in a table cell: nothing of it is markup."""
    text = visible(text)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
