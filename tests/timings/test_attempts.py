"""A log that holds several starts of its job, as a scheduler that requeues a job leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from mlflashpoint.timings.samples import TimingSet
from tests.timings.helpers import block, iteration, parsed, save_line

_STARTED_OVER = "the job started over; each of its 2 starts"


def _attempt(steps: Iterable[int], every: int = 5, more: float = 0.0) -> str:
    """The lines of a run of training that saves now and then."""
    lines = ""
    for step in steps:
        # the numbers of another attempt are others
        lines += iteration(step).rstrip("|\n") + f"| elapsed: {step + more} |\n"
        if step % every == 0:
            lines += block(100.0 + step + more, 200.0 + step + more)
    return lines


def _runs(timings: TimingSet, timer: str = "save-checkpoint") -> list[tuple[int | None, int]]:
    return [(sample.step, sample.run) for sample in timings.timers[timer]]


def _told(timings: TimingSet) -> bool:
    return any(_STARTED_OVER in note for note in timings.notes)


def test_an_attempt_that_starts_from_nothing_is_a_run_of_its_own(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_attempt(range(1, 13)) + _attempt(range(1, 13), more=0.5)])
    assert _runs(timings) == [(5, 0), (10, 0), (5, 1), (10, 1)]
    assert _told(timings)


def test_the_cold_save_of_every_attempt_can_be_left_out(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_attempt(range(1, 13)) + _attempt(range(1, 13), more=0.5)])
    assert _runs(timings.without_first(1)) == [(10, 0), (10, 1)]


def test_an_attempt_is_known_by_its_saves_where_its_steps_are_not_logged(tmp_path: Path) -> None:
    def saved(step: int, more: float) -> str:
        return f"saving checkpoint at iteration {step} to /ckpt\n" + block(100.0 + step + more, 200.0 + step + more)

    timings = parsed(tmp_path, "x", ["".join(saved(step, more) for more in (0.0, 0.5) for step in (5, 10))])
    assert _runs(timings) == [(5, 0), (10, 0), (5, 1), (10, 1)]


def test_an_attempt_that_goes_on_from_a_checkpoint_is_a_run_of_its_own(tmp_path: Path) -> None:
    loaded = "  successfully loaded checkpoint from /ckpt [ t 1/1, p 1/1 ] at iteration 10\n"
    for number, sign in enumerate((loaded, "")):
        folder = tmp_path / str(number)
        folder.mkdir()
        timings = parsed(folder, "x", [_attempt(range(1, 14)) + sign + _attempt(range(11, 21), more=0.5)])
        assert _runs(timings) == [(5, 0), (10, 0), (15, 1), (20, 1)]
        assert _told(timings)


def test_runs_are_numbered_on_over_all_logs(tmp_path: Path) -> None:
    logs = [_attempt(range(1, 8)) + _attempt(range(1, 8), more=0.5), _attempt(range(1, 8), more=0.7)]
    assert _runs(parsed(tmp_path, "x", logs)) == [(5, 0), (5, 1), (5, 2)]


def test_an_attempt_without_a_save_counts_for_nothing(tmp_path: Path) -> None:
    log = _attempt(range(1, 7)) + _attempt(range(1, 4), more=0.5) + _attempt(range(1, 11), more=0.7)
    assert _runs(parsed(tmp_path, "x", [log])) == [(5, 0), (5, 1), (10, 1)]


@pytest.mark.parametrize(("prefix", "lag"), [("", 1), ("", 7), ("7: ", 1), ("7: ", 7), ("7: ", 30)])
def test_a_copy_of_the_log_in_the_same_file_is_no_attempt(tmp_path: Path, prefix: str, lag: int) -> None:
    lines = _attempt(range(1, 31)).splitlines(keepends=True)
    log = ""
    for place in range(len(lines) + lag):
        log += "".join(lines[place : place + 1])
        log += "".join(prefix + line for line in lines[place - lag : place - lag + 1] if place >= lag)
    timings = parsed(tmp_path, "x", [log])
    assert {run for _, run in _runs(timings)} == {0}
    assert not _told(timings)


def test_joined_pieces_of_one_run_that_overlap_are_one_attempt(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_attempt(range(1, 18)) + _attempt(range(8, 31))])
    assert _runs(timings) == [(step, 0) for step in (5, 10, 15, 20, 25, 30)]


def _records(attempts: Iterable[tuple[int, int]], ranks: Iterable[int], steps: Sequence[int] = (1, 2)) -> str:
    """Per attempt (incarnation, first step); each rank's own lines in order."""
    lines = ""
    for incarnation, first in attempts:
        for step in steps:
            for rank in ranks:
                number = first + step - 1
                lines += save_line(rank, number, 10.0 * incarnation + number + rank / 10, incarnation=incarnation)
    return lines


@pytest.mark.parametrize("first", [1, 3])
def test_the_incarnation_of_records_tells_an_attempt(tmp_path: Path, first: int) -> None:
    timings = parsed(tmp_path, "x", [_records([(1, 1), (2, first)], (0, 1))])
    assert _runs(timings, "flashpoint-save") == [(1, 0), (2, 0), (first, 1), (first + 1, 1)]
    assert _told(timings)


def test_records_of_ranks_one_behind_the_other_are_told_apart_by_attempt(tmp_path: Path) -> None:
    log = "".join(_records([(1, 1), (2, 1)], [rank]) for rank in (0, 1, 2))
    timings = parsed(tmp_path, "x", [log])
    assert _runs(timings, "flashpoint-save") == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert [sample.ranks for sample in timings.timers["flashpoint-save"]] == [3] * 4


def test_a_first_line_without_its_incarnation_belongs_to_the_new_attempt(tmp_path: Path) -> None:
    log = _records([(1, 1)], (0, 1)) + save_line(0, 3, 9.0, incarnation=0) + save_line(1, 3, 9.5, incarnation=2)
    assert _runs(parsed(tmp_path, "x", [log]), "flashpoint-save") == [(1, 0), (2, 0), (3, 1)]


def test_an_attempt_with_fewer_ranks_loses_no_saves(tmp_path: Path) -> None:
    log = _records([(1, 1)], range(4)) + _records([(2, 3)], range(3))
    timings = parsed(tmp_path, "x", [log])
    assert [sample.ranks for sample in timings.timers["flashpoint-save"]] == [4, 4, 3, 3]


def test_groups_with_incarnations_of_their_own_are_no_attempts(tmp_path: Path) -> None:
    log = "".join(
        save_line(rank, step, 10.0 * step + rank, group=group, incarnation=incarnation)
        for step in (1, 2, 3)
        for group, incarnation in (("policy", 1), ("reference", 4))
        for rank in (0, 1)
    )
    timings = parsed(tmp_path, "x", [log])
    assert {sample.run for samples in timings.timers.values() for sample in samples} == {0}


def test_records_without_an_incarnation_tell_an_attempt_by_their_steps(tmp_path: Path) -> None:
    log = "".join(
        f'mlflashpoint observe {{"blocking_ms": {more + rank}, "kind": "durable", "rank": {rank}, "step": {step}}}\n'
        for more in (10.0, 20.5)
        for step in (5, 10)
        for rank in (0, 1)
    )
    assert _runs(parsed(tmp_path, "x", [log]), "observed-durable-save") == [(5, 0), (10, 0), (5, 1), (10, 1)]


def test_attempts_of_nemo_rl_are_told_apart(tmp_path: Path) -> None:
    table = "========================= Step {0}/10 =========================\nSaving checkpoint for step {0}...\n"
    log = "".join(table.format(step) + "  • checkpointing: 1.25s (13.9%)\n" for _ in range(2) for step in (2, 4))
    assert _runs(parsed(tmp_path, "x", [log]), "checkpointing") == [(2, 0), (4, 0), (2, 1), (4, 1)]
