"""Timer blocks in the state in which logs have them: interleaved, torn, repeated."""

from __future__ import annotations

import json

import pytest

from tests.timings.helpers import HEADER, block, found, iteration, scan

_ALL = "times across ranks (ms):\n  save-checkpoint:\n     rank  0: 10.00\n     rank  1: 30.00\n     rank  2: 20.00\n"


def test_the_maximum_across_ranks_is_kept() -> None:
    assert found(scan(block(18450.20, 18512.90))) == [("save-checkpoint", None, 18512.9)]
    assert found(scan(_ALL)) == [("save-checkpoint", None, 30.0)]


@pytest.mark.parametrize(("unit", "seconds"), [("ms", 0.0125), ("s", 12.5), ("us", 12.5e-6)])
def test_the_unit_is_the_one_that_the_log_names(unit: str, seconds: float) -> None:
    result = scan(block(10, 12.5, header=f"(min, max) time across ranks ({unit}):"))
    assert [save.seconds for save in result.block_saves] == pytest.approx([seconds])


def test_a_time_in_an_unknown_unit_is_left_out_and_counted() -> None:
    result = scan(block(10, 12.5, header="(min, max) time across ranks (fortnights):"))
    assert (found(result), result.torn) == ([], 2)


def test_a_row_without_a_header_has_no_unit_and_is_left_out() -> None:
    result = scan(block(10, 12.5).split("\n", 1)[1])
    assert (found(result), result.torn) == ([], 1)


def test_lines_of_other_ranks_between_those_of_a_block_do_no_harm() -> None:
    lines = (block(10, 12.5) + _ALL.replace("save-checkpoint", "load-checkpoint")).splitlines()
    noise = 'WARNING: something\n  File "x.py", line 3, in f\nTraceback (most recent call last):\n'
    assert found(scan("".join(f"{line}\n{noise}" for line in lines))) == [
        ("save-checkpoint", None, 12.5),
        ("load-checkpoint", None, 30.0),
    ]


def test_a_name_of_another_writer_does_not_end_a_list_of_ranks() -> None:
    lines = _ALL.splitlines()
    lines.insert(3, "  other-name:")
    result = scan("\n".join(lines))
    assert (found(result), result.torn) == ([("save-checkpoint", None, 30.0)], 0)


def test_blocks_of_two_labelled_ranks_can_be_interleaved() -> None:
    one, other = block(10, 12.5).splitlines(), block(20, 22.5, "load-checkpoint").splitlines()
    log = f"[default0]:{one[0]}\n[default1]:{other[0]}\n[default0]:{one[1]}\n[default1]:{other[1]}\n"
    assert found(scan(log)) == [("save-checkpoint", None, 12.5), ("load-checkpoint", None, 22.5)]


@pytest.mark.parametrize("cut", range(1, len(block(18450.20, 18512.90)) - 1))
def test_a_block_that_is_cut_off_anywhere_gives_no_wrong_number(cut: int) -> None:
    text = block(18450.20, 18512.90)[:cut]
    assert found(scan(text)) == []
    # another line may be glued to the rest
    assert found(scan(f"{text}[rank 0] something 1.00\n")) == []


@pytest.mark.parametrize("cut", range(1, len(_ALL) - 1))
def test_a_list_of_ranks_that_is_cut_off_gives_no_wrong_number(cut: int) -> None:
    values = [milliseconds for _, _, milliseconds in found(scan(_ALL[:cut] + "glued\n" + iteration(3)))]
    # cut between two lines, what is left is a whole list of fewer ranks; nothing can tell
    assert values in ([], [10.0], [30.0])


def test_a_list_with_a_rank_missing_in_the_middle_is_left_out() -> None:
    result = scan(_ALL.replace("     rank  1: 30.00\n", ""))
    assert (found(result), result.torn) == ([], 1)


def test_a_long_timer_name_has_no_dots() -> None:
    name = "a" * 40 + "-checkpoint"
    assert found(scan(block(1, 2, name))) == [(name, None, 2.0)]


def test_only_checkpoint_timers_are_kept() -> None:
    log = f"{HEADER}\n" + "".join(
        block(1, 2, name).split("\n", 1)[1] for name in ("forward-backward", "save-checkpoint", "optimizer")
    )
    assert found(scan(log)) == [("save-checkpoint", None, 2.0)]


@pytest.mark.parametrize("log", [block(10, 12.5), _ALL, _ALL.replace("times across", "max time across")])
def test_lines_that_are_all_doubled_count_once(log: str) -> None:
    doubled = "".join(f"{line}\n{line}\n" for line in (iteration(5) + log).splitlines())
    assert found(scan(doubled)) == found(scan(iteration(5) + log))


def test_a_copy_of_the_log_with_another_prefix_counts_once_however_far_it_lags() -> None:
    lines = "".join(iteration(step) + block(100 + step, 200 + step) for step in range(1, 11)).splitlines()
    plain = [f"{line}\n" for line in lines]
    labelled = [f"7: {line}\n" for line in lines]
    once = found(scan("".join(plain)))
    assert len(once) == 10
    for lag in (1, 2, 3, 9, 20, 30):
        mixed = []
        for place in range(len(lines) + lag):
            mixed += plain[place : place + 1]
            mixed += labelled[place - lag : place - lag + 1] if place >= lag else []
        result = scan("".join(mixed))
        assert found(result) == once, lag
        assert result.duplicates == 10, lag


def test_two_saves_of_equal_length_are_two_if_training_went_on_in_between() -> None:
    log = iteration(5) + block(10, 12.5) + iteration(10) + block(10, 12.5)
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("save-checkpoint", 10, 12.5)]


def test_the_same_step_with_the_same_numbers_is_the_same_save_even_later_in_the_log() -> None:
    log = "".join(iteration(step) + block(10 + step, 12.5 + step) for step in (5, 10))
    assert found(scan(log + log)) == found(scan(log))


def test_a_restart_that_saves_a_step_again_counts_again() -> None:
    log = iteration(5) + block(10, 12.5) + iteration(1) + iteration(5) + block(11, 13.5)
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("save-checkpoint", 5, 13.5)]


def test_the_step_is_the_one_that_rank_0_announces_where_not_every_step_is_logged() -> None:
    log = "".join(
        [
            iteration(10),
            "saving checkpoint at iteration      15 to /ckpt in torch_dist format\n",
            block(10, 11),
            iteration(20),
            "saving checkpoint at iteration      20 to /ckpt in torch_dist format\n",
            block(10, 12),
            "saving checkpoint at iteration      25 to /ckpt in torch_dist format\n",
            block(10, 13),
        ]
    )
    assert [step for _, step, _ in found(scan(log))] == [15, 20, 25]


def test_a_copy_that_tells_no_steps_counts_once_while_rank_0_goes_on_announcing_saves() -> None:
    steps = range(1, 21)
    saving = [f"saving checkpoint at iteration {step:7d} to /ckpt in torch_dist format\n" for step in steps]
    plain = [block(100 + step, 200 + step) for step in steps]
    labelled = ["".join(f"7: {line}\n" for line in text.splitlines()) for text in plain]
    lag = 8
    log = "".join(
        "".join(
            saving[place : place + 1]
            + plain[place : place + 1]
            + labelled[max(0, place - lag) : max(0, place - lag + 1)]
        )
        for place in range(20 + lag)
    )
    assert found(scan(log)) == [("save-checkpoint", step, 200.0 + step) for step in steps]


def test_an_announcement_that_comes_after_its_block_is_not_taken_for_the_next_save() -> None:
    log = "".join(
        f"[default1]:{iteration(step)}"
        + "".join(f"[default1]:{line}\n" for line in block(10, 10 + step).splitlines())
        + f"[default0]:saving checkpoint at iteration {step:7d} to /ckpt in torch_dist format\n"
        for step in (2, 4, 6)
    )
    assert [step for _, step, _ in found(scan(log))] == [2, 4, 6]


def _docker(text: str) -> str:
    return "".join(json.dumps({"log": f"{line}\n", "stream": "stdout"}) + "\n" for line in text.splitlines())


_LONG = "a" * 40 + "-checkpoint"


@pytest.mark.parametrize(
    "log",
    [
        _docker(_ALL),
        _docker(_ALL.replace("\n", "\x1b[0m\n")),
        _ALL.replace("\n", "  \n"),
        _ALL.replace("\n", "\t\x07\n"),
        _ALL.replace("\n", " \x1b[0m\n"),
        _ALL.replace("\n", "\u00a0\n"),
        _ALL.replace("save-checkpoint:", "save-checkpoint: [repeated 2x across cluster]"),
    ],
    ids=ascii,
)
def test_a_list_of_ranks_is_found_whatever_stands_behind_its_lines(log: str) -> None:
    assert found(scan(log)) == [("save-checkpoint", None, 30.0)]


@pytest.mark.parametrize("form", ["minmax", "max", "all", "flat"])
def test_a_timer_with_a_long_name_is_found_in_every_form(form: str) -> None:
    log = {
        "minmax": f"{HEADER}\n    {_LONG} : (1.00, 30.00)\n",
        "max": f"max time across ranks (ms):\n    {_LONG} : 30.00\n",
        "all": _ALL.replace("save-checkpoint", _LONG),
        "flat": f"time (ms) | {_LONG}: 30.00\n",
    }[form]
    for text in (log, _docker(log)):
        assert found(scan(text)) == [(_LONG, None, 30.0)]


def test_of_two_timers_whose_names_end_differently_both_survive() -> None:
    second = "  load-checkpoint: \n     rank  0: 11.00\n     rank  1: 31.00\n"
    assert found(scan(_ALL + second)) == [("save-checkpoint", None, 30.0), ("load-checkpoint", None, 31.0)]


def test_a_list_of_ranks_whose_name_is_missing_is_not_taken_for_the_timer_before() -> None:
    result = scan(_ALL + "     rank  0: 11.00\n     rank  1: 99.00\n     rank  2: 12.00\n     rank  3: 98.00\n")
    assert (found(result), result.torn) == ([("save-checkpoint", None, 30.0)], 1)


@pytest.mark.parametrize(
    "values",
    [
        "(10.00, 12.50) glued",
        "(10.00, 12.50)WARNING:",
        "(10.00, 12.",
        "(10.00, ",
        "(",
        "",
        "(10.00, nan)",
        "(nan, nan)",
        "(10.00, inf)",
        "(-1.00, 12.50)",
        "(12.50, 10.00)",
        "12.5",
        "-12.50",
        "12.50[rank 3] text",
    ],
)
@pytest.mark.parametrize("name", ["save-checkpoint", _LONG])
def test_a_row_that_is_torn_is_counted(name: str, values: str) -> None:
    result = scan(f"{HEADER}\n    {(name + ' ').ljust(48, '.')}: {values}\n")
    assert (found(result), result.torn) == ([], 1)


def test_a_row_that_is_cut_in_its_dots_is_counted() -> None:
    for rest in ("...", "......[default0]: text", "................................"):
        assert scan(f"{HEADER}\n    save-checkpoint {rest}\n").torn == 1


@pytest.mark.parametrize("value", ["20.00glued", "20.0", "2", "", "nan", "inf", "-20.00", "20.00 text:"])
def test_a_list_with_a_torn_rank_is_left_out_and_counted(value: str) -> None:
    result = scan(_ALL.replace("rank  2: 20.00", f"rank  2: {value}") + "  load-checkpoint:\n     rank  0: 11.00\n")
    assert (found(result), result.torn) == ([("load-checkpoint", None, 11.0)], 1)


def test_a_name_whose_list_of_ranks_never_comes_is_counted() -> None:
    for end in ("", "WARNING: something\n"):
        result = scan("\n".join([*_ALL.splitlines(), "  load-checkpoint:", end]))
        assert (found(result), result.torn) == ([("save-checkpoint", None, 30.0)], 1)


def test_a_torn_flat_row_is_counted() -> None:
    for text in ("12.5", "nan", "12.50 glued", "-1.00"):
        result = scan(f"time (ms) | save-checkpoint: {text}\n")
        assert (found(result), result.torn) == ([], 1)


@pytest.mark.parametrize(
    "line", ["WARNING:", "Traceback (most recent call last):", "/opt/x.py:12: UserWarning:", "a  b:"]
)
@pytest.mark.parametrize("place", range(2, 6))
def test_a_foreign_line_in_column_0_does_no_harm_to_a_list_of_ranks(line: str, place: int) -> None:
    lines = _ALL.splitlines()
    lines.insert(place, line)
    assert found(scan("\n".join(lines))) == [("save-checkpoint", None, 30.0)]


def test_a_foreign_name_with_two_blanks_in_front_is_told_at_least() -> None:
    lines = _ALL.splitlines()
    lines.insert(2, "  other-name:")
    result = scan("\n".join(lines))
    assert (found(result), result.torn) == ([("save-checkpoint", None, 30.0)], 0) or result.torn == 1


def test_a_list_of_ranks_that_lost_its_indentation_is_read() -> None:
    assert found(scan("\n".join(line.strip() for line in _ALL.splitlines()))) == [("save-checkpoint", None, 30.0)]


@pytest.mark.parametrize("gap", ["", " "])
def test_a_row_that_lost_its_line_end_is_counted_whatever_follows(gap: str) -> None:
    row = block(10, 12.5).rstrip("\n")
    for follower in (block(20, 22.5), block(20, 22.5).split("\n", 1)[1], "time (ms) | save-checkpoint: 22.50\n"):
        result = scan(row + gap + follower)
        assert result.torn == 1
        assert found(result) in ([], [("save-checkpoint", None, 22.5)])


def test_a_list_whose_last_rank_lost_its_line_end_is_left_out_and_counted() -> None:
    for follower in (block(20, 22.5, "load-checkpoint"), _ALL.replace("save-", "load-")):
        result = scan(_ALL.replace("rank  2: 20.00", "rank  2: 99.00").rstrip("\n") + follower)
        assert result.torn == 1
        assert [timer for timer, _, _ in found(result)] == ["load-checkpoint"]


def test_a_flat_row_that_lost_its_line_end_is_counted() -> None:
    for gap in ("", " "):
        result = scan(f"time (ms) | save-checkpoint: 12.50{gap}time (ms) | save-checkpoint: 22.50\n")
        assert result.torn == 1
