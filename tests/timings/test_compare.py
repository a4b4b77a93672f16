from __future__ import annotations

from dataclasses import replace

import pytest

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings import document, markdown, page, text, wording
from mlflashpoint.timings.compare import Comparison, Row, compare
from mlflashpoint.timings.samples import Sample
from tests.timings.helpers import timing_set

_DURABLE, _MEMORY = "save-checkpoint", "save-checkpoint-non-persistent"
_ONE = [18.1, 18.3, 18.5, 18.3]
_OTHER = [18.2, 18.4, 18.6, 18.4]


def _compared(one: dict[str, list[float]], other: dict[str, list[float]], **options: object) -> Comparison:
    return compare(timing_set("baseline", one), timing_set("flashpoint", other), **options)  # type: ignore[arg-type]


def _row(comparison: Comparison, timer: str) -> Row:
    return next(row for row in comparison.rows if row.timer == timer)


def test_a_row_has_both_sides_and_what_lies_between_them() -> None:
    row = _row(_compared({_DURABLE: [2.0, 4.0, 6.0]}, {_DURABLE: [1.0, 2.0, 3.0, 2.0]}), _DURABLE)
    assert row.baseline is not None
    assert row.candidate is not None
    assert (row.baseline.n, row.baseline.mean, row.baseline.median, row.baseline.p95) == (3, 4.0, 4.0, 5.8)
    assert (row.candidate.n, row.candidate.mean, row.candidate.median) == (4, 2.0, 2.0)
    assert (row.delta, row.percent, row.factor) == (-2.0, -50.0, 2.0)
    assert row.interval is not None
    assert row.interval[0] < -2.0 < row.interval[1]


def test_a_side_that_is_missing_leaves_nothing_to_compare() -> None:
    row = _row(_compared({_DURABLE: _ONE}, {_DURABLE: _OTHER, _MEMORY: [0.6]}), _MEMORY)
    assert (row.baseline, row.delta, row.percent, row.factor, row.interval) == (None, None, None, None, None)
    assert row.candidate is not None


def test_times_of_zero_make_no_factor() -> None:
    row = _row(_compared({_DURABLE: [0.0, 0.0]}, {_DURABLE: [0.0, 0.0]}), _DURABLE)
    assert (row.delta, row.percent, row.factor) == (0.0, None, None)


def test_the_control_comes_first_and_the_background_last() -> None:
    both = {"flashpoint-commit": [1.0], "flashpoint-save": [0.5], _MEMORY: [0.6], _DURABLE: _ONE, "a-checkpoint": [1.0]}
    assert [row.timer for row in _compared({_DURABLE: _ONE, "b-checkpoint": [1.0]}, both).rows] == [
        _DURABLE,
        "a-checkpoint",
        _MEMORY,
        "b-checkpoint",
        "flashpoint-save",
        "flashpoint-commit",
    ]


def test_a_control_within_its_noise_vouches_for_the_comparison() -> None:
    comparison = _compared({_DURABLE: _ONE}, {_DURABLE: _OTHER})
    assert (comparison.vouched, comparison.invalid) == (True, ())
    assert "within its noise" in comparison.control


def test_a_control_that_differs_beyond_its_noise_invalidates_the_comparison() -> None:
    comparison = _compared({_DURABLE: _ONE}, {_DURABLE: [value * 1.2 for value in _OTHER]})
    assert not comparison.vouched
    assert len(comparison.invalid) == 1
    assert "+20.7 %, beyond its noise" in comparison.invalid[0]


def test_a_faster_control_invalidates_it_as_well() -> None:
    assert _compared({_DURABLE: _ONE}, {_DURABLE: [value * 0.8 for value in _OTHER]}).invalid


def test_a_difference_below_the_tolerance_is_not_held_against_it() -> None:
    steady = [18.3, 18.31, 18.3, 18.31]
    shifted = [value * 1.01 for value in steady]
    assert _compared({_DURABLE: steady}, {_DURABLE: shifted}).invalid == ()
    assert _compared({_DURABLE: steady}, {_DURABLE: shifted}, tolerance_percent=0.5).invalid != ()


def test_a_tolerated_difference_beyond_the_noise_is_not_called_noise() -> None:
    steady = [18.3, 18.31, 18.3, 18.31]
    comparison = _compared({_DURABLE: steady}, {_DURABLE: [value * 1.01 for value in steady]})
    assert comparison.control == (
        "Control save-checkpoint: +1.0 %, beyond its noise of ±0.1 %, within the tolerance of 2 %."
    )
    assert comparison.vouched


def test_a_tolerated_difference_of_a_control_that_is_all_noise_vouches_for_nothing() -> None:
    comparison = _compared({_DURABLE: [1.0, 1.2, 1.4]}, {_DURABLE: [1.8, 2.2, 2.4]}, tolerance_percent=100)
    assert "+77.8 %, beyond its noise of" in comparison.control
    assert (comparison.vouched, comparison.invalid) == (False, ())


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    comparison = _compared({_DURABLE: [18.1, 18.3, 18.5]}, {_DURABLE: [18.1, 18.3, 18.499]})
    assert comparison.control.startswith("Control save-checkpoint: +0.0 %, within its noise of")


def test_a_control_that_took_no_time_vouches_for_nothing() -> None:
    comparison = _compared({_DURABLE: [0.0, 0.0]}, {_DURABLE: [0.0, 0.0]})
    assert (comparison.vouched, comparison.invalid) == (False, ())
    assert "no measurable time" in comparison.control


def test_a_control_that_took_time_in_one_arm_alone_is_told_in_milliseconds() -> None:
    comparison = _compared({_DURABLE: [0.0, 0.0]}, {_DURABLE: [0.1, 0.1]})
    assert "differs by +100.0 ms, beyond its noise of ±0.0 ms" in comparison.control
    assert len(comparison.invalid) == 1


def test_three_noisy_saves_do_not_invalidate_by_chance() -> None:
    """Where the bootstrap of three values would see a difference, Welch's interval does not."""
    comparison = _compared({_DURABLE: [1.0, 1.1, 1.2]}, {_DURABLE: [1.2, 1.25, 1.5]})
    row = _row(comparison, _DURABLE)
    assert row.interval is not None
    assert row.interval[0] > 0
    assert comparison.invalid == ()


def test_a_control_with_one_save_vouches_for_nothing() -> None:
    comparison = _compared({_DURABLE: [18.0]}, {_DURABLE: _OTHER})
    assert (comparison.vouched, comparison.invalid) == (False, ())
    assert "does not tell its noise" in comparison.control


def test_a_control_that_is_all_noise_vouches_for_nothing() -> None:
    comparison = _compared({_DURABLE: [5.0, 0.2]}, {_DURABLE: [4.0, 0.2]})
    assert (comparison.vouched, comparison.invalid) == (False, ())
    assert "would hide" in comparison.control


def test_without_a_control_that_is_said() -> None:
    comparison = _compared({_DURABLE: _ONE}, {_MEMORY: [0.6, 0.7]})
    assert (comparison.vouched, comparison.invalid) == (False, ())
    assert comparison.control.startswith("No control")


def test_another_control_can_be_named() -> None:
    comparison = _compared({_DURABLE: _ONE, "x": _ONE}, {_DURABLE: [1.0, 1.1], "x": _OTHER}, control="x")
    assert [row.timer for row in comparison.rows if row.control] == ["x"]
    assert comparison.vouched
    with pytest.raises(TimingsError, match=r"no timer 'y' in 'baseline'.*it has save-checkpoint"):
        _compared({_DURABLE: _ONE}, {_DURABLE: _OTHER}, control="y")


@pytest.mark.parametrize(
    ("fact", "values"), [("world_size", ([8], [16])), ("parameters", ([1000], [2000])), ("frameworks", (["A"], ["B"]))]
)
def test_arms_of_different_jobs_are_no_comparison(fact: str, values: tuple[list[object], list[object]]) -> None:
    one, other = (
        timing_set(label, {_DURABLE: samples}, job={fact: value})
        for label, samples, value in zip(("a", "b"), (_ONE, _OTHER), values, strict=True)
    )
    assert len(compare(one, other).invalid) == 1
    assert compare(one, timing_set("b", {_DURABLE: _OTHER}, job={fact: values[0]})).invalid == ()


_STALLS = [1.1088, 1.1101, 1.1124, 1.0972, 1.1215]


@pytest.mark.parametrize("first", [0, 2])
def test_arms_that_share_a_log_are_no_comparison(first: int) -> None:
    """The log as a whole, or a later piece of it that another collector has kept."""
    one, other = timing_set("a", {_DURABLE: _STALLS}), timing_set("b", {_DURABLE: _STALLS}).without_first(first)
    more = replace(other, timers={_DURABLE: (*other.timers[_DURABLE], Sample(1.0931, 0, 9, 50))})
    for arms in ((one, other), (other, one), (one, more)):
        invalid = compare(arms[0], replace(arms[1], label="c")).invalid
        assert len(invalid) == 1
        assert f"{5 - first} saves are in both arms, equal to the last digit (run 1 of" in invalid[0]


@pytest.mark.parametrize(
    "stalls",
    [
        [1.1088, 1.1101, 1.1125, 1.0973, 1.1216],  # two of five
        [1.1101, 1.1124, 1.0972, 1.1215, 1.1088],  # at other steps
        [1.1088, 1.1101, 1.1124, *(1.2 + index / 999 for index in range(6))],  # few of many
    ],
)
def test_a_few_equal_times_are_chance(stalls: list[float]) -> None:
    noise = [1.1 + index / 999 for index in range(4)] if len(stalls) > 5 else []
    assert _compared({_DURABLE: _STALLS + noise}, {_DURABLE: stalls}, tolerance_percent=50).invalid == ()


def test_times_in_steps_of_ten_milliseconds_may_be_equal() -> None:
    stalls = [1.1, 1.11, 1.12, 1.1, 1.12]
    assert _compared({"checkpointing": stalls}, {"checkpointing": stalls}).invalid == ()


def test_a_label_used_twice_is_refused() -> None:
    with pytest.raises(TimingsError, match="the label 'a' is used twice"):
        compare(timing_set("a", {_DURABLE: _ONE}), timing_set("a", {_DURABLE: _OTHER}))


def test_the_first_saves_can_be_left_out() -> None:
    comparison = _compared({_DURABLE: [90.0, *_ONE]}, {_DURABLE: [55.0, *_OTHER]}, skip_first=1)
    row = _row(comparison, _DURABLE)
    assert row.baseline is not None
    assert row.baseline.n == 4
    assert row.baseline.mean == pytest.approx(18.3)
    assert comparison.vouched
    with pytest.raises(TimingsError, match="no sample of 'baseline' is left"):
        _compared({_DURABLE: _ONE}, {_DURABLE: _OTHER}, skip_first=4)


def test_a_timer_that_has_only_first_saves_is_told() -> None:
    comparison = _compared({_DURABLE: _ONE, "x": [1.0, 1.1]}, {_DURABLE: _OTHER, _MEMORY: [0.6] * 3}, skip_first=3)
    assert [row.timer for row in comparison.rows] == [_DURABLE]
    assert comparison.cautions[-2:] == (
        "x: all 2 saves of baseline are among the first ones, which are left out.",
        "save-checkpoint-non-persistent: all 3 saves of flashpoint are among the first ones, which are left out.",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"headline": True}, "no headline: no sample of 'save-checkpoint-non-persistent' in 'flashpoint' is left"),
        ({"headline": True, "substitute": _MEMORY}, f"no headline: no sample of '{_MEMORY}' in 'flashpoint' is left"),
        ({"headline": True, "durable": "x"}, "no headline: no sample of 'x' in 'baseline' is left"),
        ({"control": "x"}, "no sample of 'x' in 'baseline' is left"),
    ],
)
def test_a_timer_that_is_asked_for_and_has_only_first_saves_is_blamed_on_them(
    options: dict[str, object], said: str
) -> None:
    one, other = {_DURABLE: _ONE, "x": [1.0, 1.1]}, {_DURABLE: _OTHER, "x": _OTHER, _MEMORY: [0.6] * 3}
    with pytest.raises(TimingsError, match=said) as caught:
        _compared(one, other, skip_first=3, **options)
    assert "--skip-first" in str(caught.value)


def test_the_headline_is_made_only_if_it_is_asked_for() -> None:
    arms = ({_DURABLE: _ONE}, {_DURABLE: _OTHER, _MEMORY: [0.6, 0.642]})
    assert _compared(*arms).headline is None
    headline = _compared(*arms, headline=True).headline
    assert headline is not None
    assert (headline.durable_timer, headline.substitute_timer) == (_DURABLE, _MEMORY)
    assert (headline.durable, headline.substitute) == (pytest.approx(18.3), pytest.approx(0.621))
    assert headline.factor == pytest.approx(29.47, abs=0.01)


def test_the_headline_takes_what_stands_in_for_the_durable_save_in_other_frameworks() -> None:
    headline = _compared(
        {"global-checkpoint-save": _ONE}, {"flashpoint-save[policy]": [0.5], "global-checkpoint-save": _OTHER},
        headline=True,
    ).headline  # fmt: skip
    assert headline is not None
    assert (headline.durable_timer, headline.substitute_timer) == ("global-checkpoint-save", "flashpoint-save[policy]")


def test_the_headlines_timers_can_be_named() -> None:
    arms = ({"checkpointing": [9.0, 9.1]}, {"checkpointing": [1.0, 1.1]})
    with pytest.raises(TimingsError, match="name one with --durable"):
        _compared(*arms, headline=True)
    with pytest.raises(TimingsError, match="name one with --substitute"):
        _compared(*arms, headline=True, durable="checkpointing")
    headline = _compared(*arms, headline=True, durable="checkpointing", substitute="checkpointing").headline
    assert headline is not None
    assert headline.factor == pytest.approx(9.05 / 1.05)


def test_a_headline_of_saves_that_took_no_time_is_a_sentence() -> None:
    zero = _compared({_DURABLE: [0.0, 0.0]}, {_DURABLE: [0.0, 0.0], _MEMORY: [0.6, 0.7]}, headline=True)
    assert wording.headline(zero)[0] == "The durable save took no measurable time."
    both = _compared({_DURABLE: [0.0, 0.0]}, {_DURABLE: [0.0, 0.0], _MEMORY: [0.0]}, headline=True)
    assert wording.headline(both)[0] == "The substituted save took no measurable time."
    for render in (text.render, markdown.render, page.render, document.render):
        render(zero)
        render(both)


def test_a_result_without_timers_is_not_blamed_on_an_option() -> None:
    with pytest.raises(TimingsError, match="there is no timer in 'baseline'") as caught:
        _compared({}, {_DURABLE: _OTHER})
    assert "--skip-first" not in str(caught.value)


def test_few_saves_and_the_notes_of_the_logs_are_cautions() -> None:
    one = timing_set("a", {_DURABLE: _ONE}, notes=("x.log: the job resumed from a checkpoint of step 4",))
    cautions = compare(one, timing_set("b", {_DURABLE: [*_OTHER, 18.4]})).cautions
    assert cautions == (
        "Fewer than 5 saves, too few for the interval and the p95 to mean much: save-checkpoint (4 in a).",
        "a: x.log: the job resumed from a checkpoint of step 4.",
    )
