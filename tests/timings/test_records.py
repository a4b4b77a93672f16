"""Saves that are told rank by rank: our own records, NeMo's, and NeMo RL's table."""

from __future__ import annotations

import pytest

from mlflashpoint.timings.records import MAX_RANKS
from tests.timings.helpers import found, save_line, scan

_NEMO = (
    "[NeMo I 2026-11-29 17:11:34 pl:232] Global Checkpoint Save : Rank: {rank} : Iteration: {step} : "
    "Start time: {start:.3f}s : Save duration: {seconds:.3f}s\n"
)


def _observe(rank: int, step: int, milliseconds: float, kind: str = "durable") -> str:
    return f'mlflashpoint observe {{"blocking_ms": {milliseconds}, "kind": "{kind}", "rank": {rank}, "step": {step}}}\n'


def test_a_save_is_one_sample_with_the_slowest_ranks_time() -> None:
    log = "".join(save_line(rank, 5, 10.0 + rank) for rank in (2, 0, 3, 1))
    result = scan(log)
    assert found(result) == [("flashpoint-save", 5, 13.0)]
    assert [save.ranks for _, save in result.ranked.items()] == [{0, 1, 2, 3}]


def test_a_record_that_is_logged_twice_counts_once() -> None:
    result = scan(save_line(0, 5, 10.0) * 3 + "3: " + save_line(0, 5, 10.0))
    assert (found(result), result.duplicates) == ([("flashpoint-save", 5, 10.0)], 3)


def test_the_incarnation_does_not_split_a_save() -> None:
    """A rank's first line can come before it knows the number."""
    log = save_line(0, 5, 10.0, incarnation=0) + save_line(1, 5, 12.0, incarnation=3)
    assert found(scan(log)) == [("flashpoint-save", 5, 12.0)]


def test_a_step_saved_again_after_a_restart_is_a_second_save() -> None:
    log = "".join(save_line(rank, 5, 10.0 + rank) for rank in (0, 1))
    log += "".join(save_line(rank, 5, 20.0 + rank, incarnation=2) for rank in (0, 1))
    assert found(scan(log)) == [("flashpoint-save", 5, 11.0), ("flashpoint-save", 5, 21.0)]


def test_groups_are_timed_apart() -> None:
    log = save_line(0, 5, 10.0) + save_line(0, 5, 30.0, group="reference")
    assert found(scan(log)) == [("flashpoint-save", 5, 10.0), ("flashpoint-save[reference]", 5, 30.0)]


def test_a_save_that_failed_or_was_skipped_on_one_rank_is_marked() -> None:
    log = save_line(0, 5, 10.0) + save_line(1, 5, 1.0, ok=False, error="no room") + save_line(0, 10, 1.0, skipped=True)
    assert [(save.ok, save.skipped) for _, save in scan(log).ranked.items()] == [(False, False), (True, True)]


@pytest.mark.parametrize(
    "changed",
    [
        {"blocking_ms": "10"},
        {"blocking_ms": -1},
        {"blocking_ms": True},
        {"blocking_ms": 1e400},
        {"rank": -1},
        {"rank": MAX_RANKS},
        {"rank": 1.5},
        {"step": None},
        {"group": 3},
        {"ok": "yes"},
        {"seq": True},
    ],
)
def test_a_record_with_an_impossible_value_is_torn(changed: dict[str, object]) -> None:
    result = scan(save_line(0, 5, 10.0, **changed))
    assert (found(result), result.torn) == ([], 1)


def test_a_record_that_is_cut_off_anywhere_is_torn() -> None:
    line = save_line(0, 5, 10.0).rstrip("\n")
    start = line.index("{")
    for cut in range(start + 1, len(line)):
        result = scan(line[:cut])
        assert (found(result), result.torn) == ([], 1), line[:cut]


def test_observed_saves_are_timed_by_kind() -> None:
    log = _observe(0, 5, 100.0) + _observe(1, 5, 110.0) + _observe(0, 7, 3.0, "non_persistent")
    assert found(scan(log)) == [("observed-durable-save", 5, 110.0), ("observed-non-persistent-save", 7, 3.0)]


def test_two_checkpoints_of_one_step_are_two_whatever_the_order_of_the_ranks() -> None:
    """A rank's nth line belongs to the nth save: ModelCheckpoint writes the best and the last one of a step."""
    first, second = [_observe(rank, 5, 100.0 + rank) for rank in (0, 1)], [_observe(rank, 5, 50.0) for rank in (0, 1)]
    for log in (first + second, [first[0], second[0], first[1], second[1]], [first[1], second[1], first[0], second[0]]):
        assert sorted(ms for _, _, ms in found(scan("".join(log)))) == [50.0, 101.0]


def test_a_commit_is_timed_apart_from_the_save() -> None:
    log = 'mlflashpoint commit {"bytes": 9, "commit_ms": 44.5, "group": "default", "rank": 0, "step": 5}'
    assert found(scan(log)) == [("flashpoint-commit", 5, 44.5)]


def test_nemos_lines_of_several_ranks_are_one_save() -> None:
    log = "".join(
        _NEMO.format(rank=rank, step=3, start=100.0 + rank / 1000, seconds=0.25 + rank / 10) for rank in range(4)
    )
    assert found(scan(log)) == [("global-checkpoint-save", 3, 550.0)]


def test_nemos_two_saves_of_one_iteration_are_two_even_if_equally_long() -> None:
    log = "".join(_NEMO.format(rank=0, step=3, start=start, seconds=0.25) for start in (100.0, 101.0, 101.0))
    assert found(scan(log)) == [("global-checkpoint-save", 3, 250.0)] * 2


def test_nemos_line_without_an_iteration_is_understood() -> None:
    log = _NEMO.format(rank=0, step=3, start=1.0, seconds=0.25).replace(" : Iteration: 3", "")
    assert found(scan(log)) == [("global-checkpoint-save", None, 250.0)]


def test_nemos_load_is_understood() -> None:
    log = (
        "[NeMo I 2026-11-29 17:11:34 pl:311] Global Checkpoint Load : Rank : 0 : Start time : 17.000s : "
        "Time spent in load_checkpoint: 1.500s\n"
    )
    assert found(scan(log)) == [("global-checkpoint-load", None, 1500.0)]


def test_nemo_rls_two_spellings_of_the_table_are_understood() -> None:
    step = "\n========================= Step {0}/10 =========================\nSaving checkpoint for step {0}...\n"
    log = step.format(2) + "⏱️  Timing:\n  • Total step time: 9.00s\n  • checkpointing: 1.25s (13.9%)\n"
    log += step.format(4) + "  • checkpointing: 1.25s\n"
    assert found(scan(log)) == [("checkpointing", 2, 1250.0), ("checkpointing", 4, 1250.0)]


def test_nemo_rls_rounded_times_do_not_make_a_restarts_save_a_copy() -> None:
    step = "========================= Step {0}/10 =========================\n"
    table = "Saving checkpoint for step 2...\n  • checkpointing: 1.25s (13.9%)\n"
    log = step.format(2) + table + step.format(1) + step.format(2) + table
    assert found(scan(log)) == [("checkpointing", 2, 1250.0)] * 2


@pytest.mark.parametrize("seconds", ["0.2", "0.250s glued", "nan", "-0.250", "inf"])
def test_a_torn_line_of_nemo_is_counted(seconds: str) -> None:
    line = _NEMO.format(rank=0, step=3, start=1.0, seconds=0.25).replace("0.250s", seconds)
    assert (found(scan(line)), scan(line).torn) == ([], 1)


@pytest.mark.parametrize("seconds", ["1.2", "1.25s (13.9%)glued", "nans", "-1.25s", "1.25"])
def test_a_torn_row_of_nemo_rl_is_counted(seconds: str) -> None:
    result = scan(f"  • checkpointing: {seconds}\n  • policy_training: {seconds}\n")
    assert (found(result), result.torn) == ([], 1)


@pytest.mark.parametrize("milliseconds", ["NaN", "Infinity", "-1.0", "1e400", "12"])
def test_a_record_of_ours_with_an_impossible_time_is_counted(milliseconds: str) -> None:
    line = save_line(0, 3, 1.5).replace("1.5", milliseconds)
    if milliseconds == "12":
        line = line[: line.index("12") + 2]
    assert (found(scan(line)), scan(line).torn) == ([], 1)


def test_a_record_of_ours_is_counted_as_torn_wherever_it_was_cut() -> None:
    line = save_line(0, 3, 1.5).rstrip("\n")
    for length in range(line.index("save") + 4, len(line)):
        assert (found(scan(line[:length])), scan(line[:length]).torn) == ([], 1), line[:length]


def _glued(*lines: str) -> str:
    return "".join(line.rstrip("\n") for line in lines) + "\n"


def test_of_two_records_on_one_line_both_are_read() -> None:
    result = scan(_glued(save_line(0, 5, 10.0), save_line(1, 5, 12.0)))
    assert (found(result), result.torn) == ([("flashpoint-save", 5, 12.0)], 0)


def test_a_record_that_another_one_cut_in_two_is_torn_and_the_other_one_is_read() -> None:
    first = save_line(0, 5, 10.0).rstrip("\n")
    result = scan(first[:40] + save_line(1, 5, 12.0) + first[40:])
    assert (found(result), result.torn) == ([("flashpoint-save", 5, 12.0)], 1)


def test_of_two_of_nemos_lines_on_one_line_both_are_read() -> None:
    lines = [_NEMO.format(rank=rank, step=3, start=100.0, seconds=0.35 - rank / 10) for rank in (0, 1)]
    result = scan(_glued(*lines))
    assert (found(result), result.torn) == ([("global-checkpoint-save", 3, 350.0)], 0)
    assert [save.ranks for _, save in result.ranked.items()] == [{0, 1}]


def test_a_line_of_nemo_that_another_one_cut_is_torn_and_the_other_one_is_read() -> None:
    first, second = (_NEMO.format(rank=rank, step=3, start=100.0, seconds=0.25) for rank in (0, 1))
    result = scan(_glued(first.rstrip("\n")[:-2], second))
    assert (found(result), result.torn) == ([("global-checkpoint-save", 3, 250.0)], 1)
    assert [save.ranks for _, save in result.ranked.items()] == [{1}]


def test_records_of_two_kinds_on_one_line_are_both_read() -> None:
    result = scan(_glued(save_line(0, 3, 10.0), _NEMO.format(rank=0, step=3, start=1.0, seconds=0.25)))
    assert found(result) == [("flashpoint-save", 3, 10.0), ("global-checkpoint-save", 3, 250.0)]


def test_of_two_rows_of_nemo_rl_on_one_line_both_are_read() -> None:
    step = "========================= Step 2/10 =========================\n"
    result = scan(step + "  • checkpointing: 1.25s (13.9%)  • load_checkpoint: 0.05s\n")
    assert (found(result), result.torn) == ([("checkpointing", 2, 1250.0), ("load_checkpoint", None, 50.0)], 0)
