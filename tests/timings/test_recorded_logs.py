"""The logs under ``logs/`` are what the real programs printed; ``logs/README.md`` says which."""

from __future__ import annotations

import pytest

from mlflashpoint.timings.parser import parse
from tests.timings.helpers import LOGS, found, scan

_MEMORY, _DURABLE = "save-checkpoint-non-persistent", "save-checkpoint"

EXPECTED = {
    "bridge-0.4.2-minmax.log": [
        (_MEMORY, 2, 70.55),
        (_MEMORY, 4, 67.99),
        (_DURABLE, 6, 4660.48),
        (_MEMORY, 8, 49.44),
        (_MEMORY, 10, 61.88),
        (_DURABLE, 12, 367.83),
    ],
    "bridge-0.5.1-minmax.log": [
        (_MEMORY, 2, 49.95),
        (_MEMORY, 4, 44.98),
        (_DURABLE, 6, 3692.94),
        (_MEMORY, 8, 41.64),
        (_MEMORY, 10, 50.08),
        (_DURABLE, 12, 175.84),
    ],
    "bridge-0.6.2-minmax.log": [
        (_MEMORY, 2, 71.03),
        (_MEMORY, 4, 56.62),
        (_DURABLE, 6, 5511.44),
        (_MEMORY, 8, 58.85),
        (_MEMORY, 10, 42.51),
        (_DURABLE, 12, 180.61),
    ],
    # the block of step 2 stands before rank 0's lines of that save: torchrun keeps no order between ranks
    "bridge-0.6.2-all-torchrun-tee.log": [
        (_MEMORY, 2, 95.92),
        (_DURABLE, 4, 8050.42),
        (_MEMORY, 6, 89.76),
        (_DURABLE, 8, 295.43),
    ],
    "bridge-0.6.2-max-torchrun-tee.log": [(_MEMORY, 2, 165.32), (_DURABLE, 3, 7045.62), (_MEMORY, 4, 129.78)],
    "bridge-0.6.2-max-resumed.log": [("load-checkpoint", None, 85.1), (_DURABLE, 6, 4618.85)],
    "megatron-lm-2.6.log": [(_DURABLE, 1, 10.11), (_DURABLE, 2, 20.11), (_DURABLE, 3, 30.14)],
    "nemo-rl-sft.log": [("checkpointing", 2, 20.0), ("checkpointing", 4, 50.0)],
    "nemo-2.7.3.log": [
        ("global-checkpoint-save", step, milliseconds)
        for step, milliseconds in (
            (1, 6856),
            (1, 231),
            (3, 309),
            (3, 424),
            (5, 416),
            (5, 340),
            (7, 333),
            (7, 495),
        )
    ],
    "nemo-2.7.3-progress-bar.log": [
        ("global-checkpoint-save", step, milliseconds)
        for step, milliseconds in (
            (1, 4176),
            (1, 226),
            (3, 208),
            (3, 220),
            (5, 216),
            (5, 225),
            (7, 223),
            (7, 216),
        )
    ],
    "ray.log": [
        ("flashpoint-save[policy]", 1, 13.0),
        ("save-checkpoint", None, 101.5),
        ("flashpoint-save[policy]", 2, 23.0),
        ("save-checkpoint", None, 201.5),
        ("flashpoint-save[policy]", 3, 33.0),
        ("save-checkpoint", None, 301.5),
    ],
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_save_of_a_recorded_log_is_found_once_with_its_slowest_rank(name: str) -> None:
    result = scan((LOGS / name).read_bytes())
    assert sorted(found(result), key=str) == sorted(EXPECTED[name], key=str)
    assert result.torn == 0


@pytest.mark.parametrize("option", ["minmax", "max", "all"])
@pytest.mark.parametrize("release", ["core-0.15.3", "core-0.16.1", "core-0.19.2", "megatron-lm-2022"])
def test_every_release_and_option_of_megatrons_timers_is_understood(release: str, option: str) -> None:
    result = scan((LOGS / f"{release}-{option}.log").read_bytes())
    assert [(timer, step) for timer, step, _ in found(result)] == [
        (_MEMORY, 1),
        (_DURABLE, 2),
        (_MEMORY, 2),
        (_MEMORY, 3),
        (_MEMORY, 4),
    ]
    # the recording slept 10 ms times the step, and 3 ms more on rank 1, the slower one
    for _, step, milliseconds in found(result):
        assert step is not None
        assert 10 * step + 3 <= milliseconds < 10 * step + 5
    for save in result.block_saves:
        assert (save.least is None) == (option == "max")


def test_a_recorded_resume_is_told() -> None:
    assert scan((LOGS / "bridge-0.6.2-max-resumed.log").read_bytes()).facts.resumed_from == [4]


def test_the_size_of_the_model_is_read_for_telling_jobs_apart() -> None:
    for name in ("bridge-0.4.2-minmax.log", "bridge-0.6.2-minmax.log"):
        assert scan((LOGS / name).read_bytes()).facts.parameters == {30080}


def test_save_records_that_ray_left_out_are_counted() -> None:
    result = scan((LOGS / "ray-deduplicated.log").read_bytes())
    assert result.collapsed == 11
    assert scan((LOGS / "ray.log").read_bytes()).collapsed == 0


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_it_does_not_matter_how_the_bytes_arrive(chunk: int) -> None:
    data = (LOGS / "nemo-2.7.3-progress-bar.log").read_bytes() + (LOGS / "core-0.19.2-all.log").read_bytes()
    assert found(scan(data, chunk)) == found(scan(data))


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("*.log") if path.stem != "ray-deduplicated"))
def test_a_recorded_log_is_one_run_that_loses_no_save(name: str) -> None:
    timings = parse("x", [str(LOGS / name)])
    assert {sample.run for samples in timings.timers.values() for sample in samples} == {0}
    assert not [note for note in timings.notes if "started over" in note or "saves are left out" in note]
    assert sum(map(len, timings.timers.values())) == len(found(scan((LOGS / name).read_bytes())))


def test_saves_of_which_ray_left_records_out_are_no_samples() -> None:
    timings = parse("x", [str(LOGS / "ray-deduplicated.log")])
    assert list(timings.timers) == ["save-checkpoint"]
    assert any("saves are left out" in note for note in timings.notes)
