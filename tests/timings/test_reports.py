from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from mlflashpoint.timings import charts, document, markdown, page, text, wording
from mlflashpoint.timings.compare import Comparison, compare
from mlflashpoint.timings.samples import Sample, TimingSet
from mlflashpoint.timings.scale import Scale
from tests.timings.helpers import timing_set

_HOSTILE = "<script>alert(1)</script>|`*\"'&"
#: HTML elements without an end tag
_VOID = ("meta", "br")


def _example(headline: bool = True, shift: float = 1.0) -> Comparison:
    return compare(
        timing_set("baseline", {"save-checkpoint": [18.2, 18.3, 18.418]}),
        timing_set(
            "flashpoint",
            {
                "save-checkpoint": [18.3 * shift, 18.4 * shift, 18.506 * shift],
                "save-checkpoint-non-persistent": [0.6, 0.61, 0.62, 0.63, 0.645],
            },
        ),
        headline=headline,
    )


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def _read(comparison: Comparison) -> _Page:
    parsed = _Page()
    parsed.feed(page.render(comparison))
    parsed.close()
    assert parsed.open == []
    return parsed


def test_the_text_is_a_table_with_two_lines_per_timer_and_what_to_think_of_it() -> None:
    lines = text.render(_example()).splitlines()
    assert lines[0].split() == [
        "timer",
        "arm",
        "n",
        "mean",
        "median",
        "p95",
        "delta",
        "of",
        "the",
        "means",
        "95%",
        "interval",
    ]
    assert lines[2].split() == ["save-checkpoint", "(control)", "baseline", "3", "18.306s", "18.300s", "18.406s"]
    assert lines[3].split()[:8] == ["flashpoint", "3", "18.402s", "18.400s", "18.495s", "+96.0ms", "(+0.5%,", "0.99x)"]
    assert lines[4].split() == ["save-checkpoint-non-persistent", "baseline", "-", "-", "-", "-"]
    assert lines[5].split() == ["flashpoint", "5", "621.0ms", "620.0ms", "642.0ms", "n/a", "n/a"]
    assert "Control save-checkpoint: +0.5 %, within its noise of ±1.3 %." in lines


def test_the_headline_names_the_mode_in_which_it_is_a_saving() -> None:
    shown = text.render(_example())
    assert "baseline    save-checkpoint                 18.306s  <- what a checkpoint used to cost" in shown
    assert "flashpoint  save-checkpoint-non-persistent  621.0ms  <- what the substituted checkpoint costs now" in shown
    assert "~29.5x faster, 17.685s off each substituted save" in shown
    assert "only in replace mode" in shown


@pytest.mark.parametrize("render", [text.render, markdown.render, page.render])
def test_no_headline_is_shown_unasked(render: object) -> None:
    assert callable(render)
    assert "replace mode" not in render(_example(headline=False))
    assert "faster" not in render(_example(headline=False))


@pytest.mark.parametrize("render", [text.render, markdown.render, page.render])
def test_an_invalid_comparison_says_so_also_in_its_headline(render: object) -> None:
    assert callable(render)
    shown = render(_example(shift=1.3))
    assert re.search("INVALID|Invalid|is invalid", shown)
    assert shown.index("Not to be relied on") < shown.index("faster")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.000ms"),
        (0.0099994, "9.999ms"),
        (0.0099996, "10.0ms"),
        (0.99994, "999.9ms"),
        (0.99996, "1.000s"),
        (59.9996, "60.000s"),
    ],
)
def test_a_time_is_written_in_the_form_of_its_rounded_value(value: float, shown: str) -> None:
    assert wording.seconds(value) == shown


def test_a_change_that_rounds_to_nothing_has_no_minus() -> None:
    row = compare(
        timing_set("a", {"save-checkpoint": [18.1, 18.3, 18.5]}),
        timing_set("b", {"save-checkpoint": [18.1, 18.3, 18.499]}),
    ).rows[0]
    assert wording.percent(row) == "+0.0%"
    assert wording.signed(-1e-9) == "+0.000ms"
    assert wording.signed(-1e-6) == "-0.001ms"


@pytest.mark.parametrize(
    ("substitute", "said"),
    [
        (18.3, "The substituted save takes as long as the durable one, to within 0.5 %."),
        (18.25, "The substituted save takes as long as the durable one, to within 0.5 %."),
        (17.0, "~1.08x faster, 1.300s off each substituted save."),
        (20.0, "~1.09x slower, 1.700s on each substituted save."),
        (0.001, "~18,300x faster, 18.299s off each substituted save."),
    ],
)
def test_the_headline_is_a_sentence_for_every_factor(substitute: float, said: str) -> None:
    one, other = timing_set("a", {"save-checkpoint": [18.3]}), timing_set("b", {"flashpoint-save": [substitute]})
    assert wording.headline(compare(one, other, headline=True))[0] == said


@pytest.mark.parametrize(
    ("skipped", "said"),
    [(1, "The first save of each timer and run is left out."), (2, "The first 2 saves of each timer and run are left")],
)
def test_the_saves_left_out_are_counted_in_words(skipped: int, said: str) -> None:
    arms = (timing_set(label, {"save-checkpoint": [9.0, 8.0, 7.0, 7.1]}) for label in "ab")
    assert said in " ".join(wording.explanation(compare(*arms, skip_first=skipped)))


@pytest.mark.parametrize("shift", [1.0, 1.3])
def test_the_headline_in_markdown_is_whole_sentences(shift: float) -> None:
    line = markdown.render(_example(shift=shift)).splitlines()[-1]
    assert ".." not in line
    assert "%.**." not in line
    assert re.findall(r"\S+ It is a saving only", line)[0].split()[0].endswith((".", ".**"))


def test_a_timers_name_is_shown_in_markdown_as_it_is() -> None:
    arms = (timing_set(label, {"<img>\\x|y": [1.0, 2.0]}) for label in "ab")
    shown = markdown.render(compare(*arms, headline=True, durable="<img>\\x|y", substitute="<img>\\x|y"))
    assert "| `<img>\\x\\|y` | a |" in shown
    assert "**a** `<img>\\x|y` 1.500s" in shown


def test_markdown_has_a_row_per_timer_and_arm() -> None:
    rows = [line for line in markdown.render(_example()).splitlines() if line.startswith("|")]
    assert len({line.count(" | ") for line in rows}) == 1
    assert rows[2].startswith("| `save-checkpoint` (control) | baseline | 3 | 18.306s | 18.300s | 18.406s |")
    assert "| flashpoint | 5 | 621.0ms | 620.0ms | 642.0ms | n/a | n/a | n/a | n/a |" in rows[5]


def test_json_has_the_numbers_and_null_where_a_side_is_missing() -> None:
    read = json.loads(document.render(_example()))
    assert (read["baseline"], read["candidate"], read["valid"], read["vouched"]) == (
        "baseline",
        "flashpoint",
        True,
        True,
    )
    control, memory = read["rows"]
    assert control["control"]
    assert control["baseline"]["mean"] == pytest.approx(18.306)
    assert control["interval"][0] < control["delta"] < control["interval"][1]
    assert (memory["baseline"], memory["delta"], memory["interval"]) == (None, None, None)
    assert read["headline"]["factor"] == pytest.approx(29.478, abs=1e-3)
    assert "replace mode" in read["headline"]["meaning"]


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    parsed = _read(_example())
    tags = {tag for tag, _ in parsed.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in parsed.seen:
        assert not {name for name in attributes if name in ("src", "href", "xlink:href", "action") or name[:2] == "on"}
    shown = page.render(_example())
    assert "url(" not in shown
    assert "@import" not in shown
    assert re.findall(r"https?://[^\s\"'<]+", shown) == []


def test_the_page_shows_every_number_of_the_table() -> None:
    shown = _read(_example()).text
    for number in ("18.306s", "18.402s", "18.495s", "621.0ms", "+96.0ms", "+0.5%", "n/a", "~29.5x faster"):
        assert number in shown


def test_every_save_is_drawn_in_both_drawings() -> None:
    titles = re.findall(r"<title>([^<]*step[^<]*)</title>", page.render(_example()))
    assert len(titles) == 2 * 11
    assert titles.count("flashpoint, save-checkpoint-non-persistent: 645.0ms, step 25, run 1") == 2


def test_text_of_a_log_is_never_markup() -> None:
    comparison = compare(
        timing_set("a", {_HOSTILE + "checkpoint": [1.0, 2.0]}, notes=(_HOSTILE,)),
        timing_set("b", {_HOSTILE + "checkpoint": [1.0, 2.0]}),
    )
    assert not {tag for tag, _ in _read(comparison).seen} & {"script"}
    # in code nothing is markup
    assert "<script>" not in re.sub("`[^`\n]*`", "", markdown.render(comparison))
    for line in markdown.render(comparison).splitlines():
        if line.startswith("| `"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 11


@pytest.mark.parametrize("render", [text.render, markdown.render, page.render, document.render])
def test_control_characters_of_a_log_are_shown_and_not_sent(render: object) -> None:
    assert callable(render)
    evil = "".join(map(chr, (*range(32), *range(127, 160)))) + "\u2028\u202e\u2066\ud800\udcff"
    arms = [timing_set(f"{label}{evil}", {f"{evil}checkpoint": [1.0, 2.0]}, notes=(evil,)) for label in "ab"]
    shown = render(compare(*arms, headline=True, durable=f"{evil}checkpoint", substitute=f"{evil}checkpoint"))
    plain = render(_example())
    assert {mark for mark in shown if not mark.isprintable()} == {"\n"} == {m for m in plain if not m.isprintable()}
    shown.encode()
    if render is not document.render:
        assert "\\x1b" in shown.replace("\\\\", "\\")


def test_saves_without_a_step_are_drawn_in_the_order_of_the_log() -> None:
    one, other = (TimingSet(label, {"save-checkpoint": (Sample(1.0, 0, 3), Sample(2.0, 0, 7))}) for label in ("a", "b"))
    drawing = charts.stall_over_time(compare(one, other))
    assert "save, in the order of the log" in drawing
    assert drawing.count("run 1</title>") == 4


def test_of_very_many_saves_the_slowest_are_drawn() -> None:
    many = [1.0] * 5000
    many[1234] = 9.0
    comparison = compare(timing_set("a", {"save-checkpoint": many}), timing_set("b", {"save-checkpoint": [1.0, 1.1]}))
    drawing = charts.stall_over_time(comparison)
    assert drawing.count("a, save-checkpoint:") <= charts.MAX_DOTS
    assert "a, save-checkpoint: 9.000s" in drawing
    assert "slowest of every few" in page.render(comparison)


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [([0.6, 18.0], True), ([17.0, 18.0], False), ([0.0], False), ([], False), ([0.0, 5.0], False)],
)
def test_an_axis_holds_all_values_and_is_logarithmic_only_over_a_wide_range(
    values: list[float], logarithmic: bool
) -> None:
    scale = Scale.of_times(values)
    assert scale.logarithmic == logarithmic
    assert all(0 <= scale.place(value) <= 1 for value in values)
    assert 2 <= len(scale.ticks) <= 12
    assert list(scale.ticks) == sorted(set(scale.ticks))


@pytest.mark.parametrize("values", [[5], [0, 1], [10, 1_000_000], [3, 4, 1000]])
def test_the_axis_of_steps_holds_all_steps(values: list[int]) -> None:
    scale = Scale.of_steps(values)
    assert all(0 < scale.place(value) < 1 for value in values)
    assert all(0 <= scale.place(tick) <= 1 for tick in scale.ticks)
    assert 1 <= len(scale.ticks) <= 12
