"""Saves of which not all ranks' timings are there: the maximum across ranks is not known, and no lower one is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.samples import TimingSet
from tests.timings.helpers import parsed, save_line

_NEMO = (
    "[NeMo I 2026-11-29 17:11:34 pl:232] Global Checkpoint Save : Rank: {0} : Iteration: {1} : "
    "Start time: {1}00.00{0}s : Save duration: {2:.3f}s\n"
)


def _nemo(rank: int, step: int, milliseconds: float) -> str:
    return _NEMO.format(rank, step, milliseconds / 1e3)


def _observe(rank: int, step: int, milliseconds: float) -> str:
    return (
        f'mlflashpoint observe {{"blocking_ms": {milliseconds}, "kind": "durable", "rank": {rank}, "step": {step}}}\n'
    )


def _commit(rank: int, step: int, milliseconds: float) -> str:
    return (
        f'mlflashpoint commit {{"bytes": 9, "commit_ms": {milliseconds}, "group": "default", '
        f'"rank": {rank}, "step": {step}}}\n'
    )


_KINDS = pytest.mark.parametrize("line", [save_line, _nemo, _observe, _commit])


def _lines(
    line: Callable[[int, int, float], str] = save_line,
    ranks: Iterable[int] = range(4),
    steps: Iterable[int] = (1, 2, 3),
) -> dict[tuple[int, int], str]:
    """By step and rank; the slowest rank is the last one."""
    return {(step, rank): line(rank, step, 10.0 * step + rank) for step in steps for rank in ranks}


def _samples(timings: TimingSet) -> list[tuple[int | None, float]]:
    (samples,) = timings.timers.values()
    return [(sample.step, round(sample.seconds * 1e3, 3)) for sample in samples]


def _left_out(timings: TimingSet) -> list[str]:
    return [note.split(": ")[1] for note in timings.notes if "maximum across ranks is not known" in note]


@_KINDS
def test_a_save_without_the_record_of_a_rank_that_tells_of_others_is_left_out(
    tmp_path: Path, line: Callable[[int, int, float], str]
) -> None:
    lines = _lines(line)
    del lines[2, 3]
    timings = parsed(tmp_path, "x", ["".join(lines.values())])
    assert (_samples(timings), _left_out(timings)) == ([(1, 13.0), (3, 33.0)], ["1 saves are left out"])


@_KINDS
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_save_with_a_torn_record_is_left_out_wherever_that_was_cut(
    tmp_path: Path, step: int, line: Callable[[int, int, float], str]
) -> None:
    lines = _lines(line)
    whole = lines[step, 3].rstrip("\n")
    kept = [(other, 10.0 * other + 3) for other in (1, 2, 3) if other != step]
    for cut in range(8, len(whole)):
        lines[step, 3] = whole[:cut] + "\n"
        timings = parsed(tmp_path, "x", ["".join(lines.values())])
        assert (_samples(timings), _left_out(timings)) == (kept, ["1 saves are left out"]), whole[:cut]


@pytest.mark.parametrize("value", ["1e400", "-13.0", '"13.0"', "true", "NaN"])
def test_a_save_with_an_impossible_time_of_a_rank_is_left_out(tmp_path: Path, value: str) -> None:
    log = "".join(_lines().values()).replace('"blocking_ms": 13.0', f'"blocking_ms": {value}')
    timings = parsed(tmp_path, "x", [log])
    assert (_samples(timings), _left_out(timings)) == ([(2, 23.0), (3, 33.0)], ["1 saves are left out"])


def test_the_records_of_some_ranks_are_enough_if_the_log_never_has_more(tmp_path: Path) -> None:
    for number, ranks in enumerate(([0], [0, 2])):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = "using world size: 8, data-parallel size: 8, ...\n" + "".join(_lines(ranks=ranks).values())
        timings = parsed(folder, "x", [log])
        assert _samples(timings) == [(step, 10.0 * step + ranks[-1]) for step in (1, 2, 3)]
        assert timings.notes == ()


def test_one_ranks_log_loses_the_torn_save_alone(tmp_path: Path) -> None:
    lines = list(_lines(ranks=[0]).values())
    lines[1] = lines[1][:40] + "\n"
    timings = parsed(tmp_path, "x", ["".join(lines)])
    assert (_samples(timings), _left_out(timings)) == ([(1, 10.0), (3, 30.0)], [])


def test_logs_of_single_ranks_are_held_against_each_other(tmp_path: Path) -> None:
    logs = [list(_lines(ranks=[rank]).values()) for rank in range(3)]
    logs[2][1] = logs[2][1][:50] + "\n"
    timings = parsed(tmp_path, "x", ["".join(log) for log in logs])
    assert (_samples(timings), _left_out(timings)) == ([(1, 12.0), (3, 32.0)], ["1 saves are left out"])


def test_a_rank_whose_every_record_is_torn_leaves_no_save(tmp_path: Path) -> None:
    log = "".join(_lines().values())
    for torn in (log.replace('"rank": 3', '"rank": "3"'), log.replace('3.0, "bytes"', '3.0"bytes"')):
        with pytest.raises(TimingsError, match=r"of no save of 'x' the maximum across ranks is known.*all ranks"):
            parsed(tmp_path, "x", [torn])


def test_a_torn_copy_of_a_record_costs_no_save(tmp_path: Path) -> None:
    lines = _lines()
    copy = lines[2, 3][:60] + "\n"
    log = "".join(lines.values()) + "".join(lines.values()).replace(lines[2, 3], copy)
    timings = parsed(tmp_path, "x", [log])
    assert (_samples(timings), _left_out(timings)) == ([(1, 13.0), (2, 23.0), (3, 33.0)], [])


def test_a_group_with_fewer_ranks_loses_no_save_to_the_torn_records_of_another(tmp_path: Path) -> None:
    lines = _lines()
    lines[2, 3] = lines[2, 3].replace('"step": 2}', '"st')
    few = [save_line(rank, step, 7.0, group="few") for rank in (0, 1) for step in (1, 2, 3)]
    timings = parsed(tmp_path, "x", ["".join([*lines.values(), *few])])
    assert {timer: len(samples) for timer, samples in timings.timers.items()} == {
        "flashpoint-save": 2,
        "flashpoint-save[few]": 3,
    }


def test_a_save_that_failed_is_told_as_failed_also_if_a_rank_is_missing(tmp_path: Path) -> None:
    lines = _lines()
    del lines[2, 3]
    lines[2, 0] = save_line(0, 2, 1.0, ok=False)
    timings = parsed(tmp_path, "x", ["".join(lines.values())])
    assert (timings.failed, _left_out(timings)) == ({"flashpoint-save": 1}, [])


def test_a_list_with_fewer_ranks_than_others_of_its_timer_is_left_out(tmp_path: Path) -> None:
    def listed(step: int, ranks: int) -> str:
        rows = "".join(f"     rank {rank:2d}: {10 * step + rank}.00\n" for rank in range(ranks))
        return f"times across ranks (ms):\n  save-checkpoint:\n{rows}"

    timings = parsed(tmp_path, "x", [listed(1, 4) + listed(2, 3) + listed(3, 4)])
    assert [seconds for _, seconds in _samples(timings)] == [13.0, 33.0]
    assert _left_out(timings) == ["1 saves are left out"]


def _at(run: float, ranks: Iterable[int], steps: Iterable[int] = (1, 3, 5)) -> str:
    """NeMo's lines of a run whose saves are 20 s apart, every rank's clock a bit off."""
    return "".join(
        f"[NeMo I 2026-11-29 17:11:34 pl:232] Global Checkpoint Save : Rank: {rank} : Iteration: {step} : "
        f"Start time: {1795972288.055 + run + 10 * step + rank:.3f}s : Save duration: {0.1 * step + rank / 100:.3f}s\n"
        for step in steps
        for rank in ranks
    )


@pytest.mark.parametrize("later", [30.0, 3600.0])
def test_ranks_of_two_runs_are_told_apart_by_the_time_of_their_saves(tmp_path: Path, later: float) -> None:
    timings = parsed(tmp_path, "x", [_at(0, [0]), _at(later, [1])])
    assert [(sample.run, sample.ranks) for sample in timings.timers["global-checkpoint-save"]] == [(0, 1)] * 3 + [
        (1, 1)
    ] * 3
    assert any("began at other times: they count as two runs" in note for note in timings.notes)


def test_ranks_of_two_runs_find_their_own_run_in_any_order(tmp_path: Path) -> None:
    logs = [_at(0, [0]), _at(3600, [1]), _at(0, [1]), _at(3600, [0])]
    timings = parsed(tmp_path, "x", logs)
    assert [(sample.run, sample.ranks) for sample in timings.timers["global-checkpoint-save"]] == [(0, 2)] * 3 + [
        (1, 2)
    ] * 3


def test_a_single_save_an_hour_later_is_of_another_run(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_at(0, [0], [1]), _at(3600, [1], [1])])
    assert [sample.run for sample in timings.timers["global-checkpoint-save"]] == [0, 1]


def test_ranks_of_one_run_stay_together_though_their_clocks_differ(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_at(0, [0]), _at(9.0, [1])])
    assert [sample.ranks for sample in timings.timers["global-checkpoint-save"]] == [2] * 3
    assert timings.notes == ()


def test_two_checkpoints_of_a_step_stay_together_though_clocks_differ_by_more(tmp_path: Path) -> None:
    logs = [_at(clock, [rank]) + _at(clock + 0.3, [rank]) for rank, clock in ((0, 0.0), (1, 2.0))]
    timings = parsed(tmp_path, "x", logs)
    assert [sample.ranks for sample in timings.timers["global-checkpoint-save"]] == [2] * 6
