"""Logs of one label that hold some of the same saves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from mlflashpoint.errors import TimingsError
from tests.timings.helpers import block, iteration, parsed, save_line

_COMMON = "equal to the last digit"


def _log(steps: Iterable[int], seed: int = 0) -> str:
    def save(step: int) -> str:
        most = 1000 + random.Random(f"{seed} {step}").random() * 100
        return iteration(step) + block(most - 50, most)

    return "".join(map(save, steps))


def test_rotated_logs_with_three_saves_in_common_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match=rf"x0\.log and .*x1\.log have 3 saves in common, {_COMMON}.*join them"):
        parsed(tmp_path, "x", [_log(range(1, 7)), _log(range(4, 10))])


def test_the_way_out_counts_each_save_of_rotated_logs_once(tmp_path: Path) -> None:
    assert len(parsed(tmp_path, "x", [_log(range(1, 7)) + _log(range(4, 10))]).timers["save-checkpoint"]) == 9


def test_three_saves_in_common_are_refused_also_if_a_fourth_differs(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="3 saves in common"):
        parsed(tmp_path, "x", [_log(range(1, 5)), _log(range(1, 4)) + _log([4], seed=1)])


@pytest.mark.parametrize("common", [1, 2])
def test_fewer_saves_in_common_are_noted(tmp_path: Path, common: int) -> None:
    timings = parsed(tmp_path, "x", [_log(range(1, 7)), _log(range(7 - common, 10))])
    assert [note for note in timings.notes if _COMMON in note and note.startswith(f"{common} of the saves")]
    assert len(timings.timers["save-checkpoint"]) == 9 + common


def test_saves_that_ranks_tell_are_noticed_in_common_too(tmp_path: Path) -> None:
    logs = [
        "".join(save_line(rank, step, 10.0 * step + rank) for step in steps for rank in (0, 1))
        for steps in (range(1, 7), range(4, 10))
    ]
    with pytest.raises(TimingsError, match="3 saves in common"):
        parsed(tmp_path, "x", logs)


def test_saves_of_several_timers_in_a_row_are_noticed_in_common(tmp_path: Path) -> None:
    def pieces(timer: str) -> list[str]:
        return [iteration(step) + block(100 + step, 200 + step, timer) for step in range(1, 9)]

    mixed = [pieces(("save-checkpoint", "save-checkpoint-non-persistent")[step % 2])[step] for step in range(8)]
    with pytest.raises(TimingsError, match="3 saves in common"):
        parsed(tmp_path, "x", ["".join(mixed[:5]), "".join(mixed[2:])])


def test_two_runs_whose_numbers_are_coarse_are_not_taken_for_one(tmp_path: Path) -> None:
    """Saves of 0.05 to 0.08 ms, told with two decimals: every fourth one is equal by chance."""
    draw = random.Random(1)

    def log() -> str:
        saves = [f"max time across ranks (ms):\n    save-checkpoint ....: 0.0{draw.randint(5, 8)}\n" for _ in range(99)]
        return "".join(iteration(step) + save for step, save in enumerate(saves, 1)) + block(1, draw.random() * 100 + 1)

    assert parsed(tmp_path, "x", [log(), log()]).notes == ()


def test_two_long_runs_with_a_few_equal_saves_are_not_taken_for_one(tmp_path: Path) -> None:
    draw = random.Random(2)

    def log() -> str:
        saves = [
            f"max time across ranks (ms):\n    save-checkpoint ....: {draw.gauss(10, 0.3):.2f}\n" for _ in range(999)
        ]
        return "".join(iteration(step) + save for step, save in enumerate(saves, 1))

    assert parsed(tmp_path, "x", [log(), log()]).notes == ()
