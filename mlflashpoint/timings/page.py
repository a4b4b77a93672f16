"""The comparison as one HTML page that needs nothing else: no script, no font, no image, no network."""

from __future__ import annotations

from mlflashpoint.timings import charts, wording
from mlflashpoint.timings.compare import Comparison, Row, Summary
from mlflashpoint.timings.escapes import markup as escape
from mlflashpoint.timings.samples import TimingSet
from mlflashpoint.timings.style import STYLE

# a page that holds text of logs may load and run nothing
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(comparison: Comparison) -> str:
    """The page; light or dark as the reader's system is, and fit for printing."""
    one, other = comparison.baseline.label, comparison.candidate.label
    body = [
        f"<header><h1>{_arm(0, one)} against {_arm(1, other)}</h1>",
        "<p class='lead'>Time that the training stood still for each checkpoint, slowest rank.</p></header>",
        _verdict(comparison),
        _headline(comparison),
        _figure(
            "Stall per save",
            _caption(comparison, "One mark per save; the line is the mean of the series."),
            charts.stall_over_time(comparison),
        ),
        _figure(
            "Distribution",
            _caption(comparison, "Marks are saves; the box holds the middle half of them, the bar is the median."),
            charts.distributions(comparison),
        ),
        "<section><h2>All timers</h2>" + _table(comparison) + "</section>",
        _notes(comparison),
        _sources(comparison),
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n"
        f"<title>{escape(one)} against {escape(other)}: checkpoint timings</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n"
        "</body>\n</html>\n"
    )


def _arm(index: int, label: str) -> str:
    return f"<span class='name arm{index}'>{escape(label)}</span>"


def _verdict(comparison: Comparison) -> str:
    if comparison.invalid:
        reasons = "".join(f"<p>{escape(reason[:1].upper() + reason[1:])}.</p>" for reason in comparison.invalid)
        return f"<section class='verdict bad'><h2>This comparison is invalid</h2>{reasons}</section>"
    title = "The control holds" if comparison.vouched else "Nothing vouches for this comparison yet"
    kind = "good" if comparison.vouched else "open"
    return f"<section class='verdict {kind}'><h2>{title}</h2><p>{escape(comparison.control)}</p></section>"


def _headline(comparison: Comparison) -> str:
    found = comparison.headline
    if found is None:
        return ""
    result, *rest = wording.headline(comparison)
    pairs = (
        (0, comparison.baseline, found.durable_timer, found.durable),
        (1, comparison.candidate, found.substitute_timer, found.substitute),
    )
    sides = "".join(
        f"<div><span class='big arm{index}'>{wording.seconds(value)}</span>"
        f"<span class='small'>{escape(arm.label)}, {escape(timer)}</span></div>"
        for index, arm, timer, value in pairs
    )
    text = "".join(f"<p>{escape(line)}</p>" for line in rest)
    result = f"<p class='result'>{escape(result)}</p>"
    return f"<section class='headline'><div class='sides'>{sides}</div>{result}{text}</section>"


def _caption(comparison: Comparison, text: str) -> str:
    parts = [text]
    if charts.is_logarithmic(comparison):
        parts.append("The time axis is logarithmic.")
    if charts.is_thinned(comparison.baseline) or charts.is_thinned(comparison.candidate):
        parts.append(f"Of more than {charts.MAX_DOTS} saves the slowest of every few is drawn.")
    return " ".join(parts)


def _figure(title: str, caption: str, drawing: str) -> str:
    if not drawing:
        return ""
    return (
        f"<section><h2>{escape(title)}</h2><figure><div class='drawing'>{drawing}</div>"
        f"<figcaption>{escape(caption)}</figcaption></figure></section>"
    )


def _table(comparison: Comparison) -> str:
    head = "".join(
        f"<th scope='col'{' class=number' if number else ''}>{name}</th>"
        for name, number in (
            ("timer", 0),
            ("arm", 0),
            ("n", 1),
            ("mean", 1),
            ("median", 1),
            ("p95", 1),
            ("delta", 1),
            ("percent", 1),
            ("factor", 1),
            ("95 % interval", 1),
        )
    )
    rows = "".join(_rows(row, comparison.baseline, comparison.candidate) for row in comparison.rows)
    explanation = " ".join(wording.explanation(comparison))
    return (
        f"<div class='wide'><table><thead><tr>{head}</tr></thead>{rows}</table></div>"
        f"<p class='note'>{escape(explanation)}</p>"
    )


def _rows(row: Row, one: TimingSet, other: TimingSet) -> str:
    role = wording.role(row)
    badge = f" <span class='badge'>{role}</span>" if role else ""
    change = [wording.delta(row), wording.percent(row), wording.factor(row)]
    changes = "".join(f"<td class='number' rowspan='2'>{escape(text)}</td>" for text in change)
    bounds = [wording.NOT_AVAILABLE] if row.interval is None else map(wording.signed, row.interval)
    changes += f"<td class='number last' rowspan='2'>{'<br>'.join(map(escape, bounds))}</td>"
    return (
        f"<tbody><tr><th scope='rowgroup' rowspan='2'>{escape(row.timer)}{badge}</th>"
        f"<td>{_arm(0, one.label)}</td>{_numbers(row.baseline)}{changes}</tr>"
        f"<tr><td>{_arm(1, other.label)}</td>{_numbers(row.candidate)}</tr></tbody>"
    )


def _numbers(summary: Summary | None) -> str:
    if summary is None:
        texts = [wording.MISSING] * 4
    else:
        texts = [str(summary.n), *map(wording.seconds, (summary.mean, summary.median, summary.p95))]
    return "".join(f"<td class='number'>{text}</td>" for text in texts)


def _notes(comparison: Comparison) -> str:
    if not comparison.cautions:
        return ""
    items = "".join(f"<li>{escape(caution)}</li>" for caution in comparison.cautions)
    return f"<section><h2>Before you quote a number</h2><ul>{items}</ul></section>"


def _sources(comparison: Comparison) -> str:
    rows = "".join(
        f"<tr><td class='first'>{_arm(index, arm.label)}</td><td class='path'>{escape(source.path)}</td>"
        f"<td class='number'>{source.lines:,}</td><td class='number'>{source.samples:,}</td>"
        f"<td class='number'>{source.duplicates:,}</td><td class='number last'>{source.torn:,}</td></tr>"
        for index, arm in enumerate((comparison.baseline, comparison.candidate))
        for source in arm.sources
    )
    if not rows:
        return ""
    return (
        "<section><h2>Logs</h2><div class='wide'><table><thead><tr><th scope='col'>arm</th><th scope='col'>log</th>"
        "<th scope='col' class='number'>lines</th><th scope='col' class='number'>saves</th>"
        "<th scope='col' class='number'>repeated</th><th scope='col' class='number'>torn</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )
