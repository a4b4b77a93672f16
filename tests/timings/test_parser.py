"""Several logs under one label."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.parser import parse
from mlflashpoint.timings.samples import TimingSet
from tests.timings.helpers import LOGS, block, iteration, parsed, save_line

_PARAMETERS = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {}\n"


def _run(first: float, saves: int = 4) -> str:
    return "".join(iteration(step) + block(first + step, first + step + 0.5) for step in range(1, saves + 1))


def test_two_logs_are_two_runs(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "baseline", [_run(10), _run(20)])
    samples = timings.timers["save-checkpoint"]
    assert [(sample.run, sample.step, sample.seconds) for sample in samples] == [
        (0, 1, 0.0115),
        (0, 2, 0.0125),
        (0, 3, 0.0135),
        (0, 4, 0.0145),
        (1, 1, 0.0215),
        (1, 2, 0.0225),
        (1, 3, 0.0235),
        (1, 4, 0.0245),
    ]


def test_the_same_ranks_in_two_logs_are_two_runs(tmp_path: Path) -> None:
    logs = ["".join(save_line(rank, step, base + rank) for rank in (0, 1) for step in (5, 10)) for base in (10.0, 20.0)]
    samples = parsed(tmp_path, "x", logs).timers["flashpoint-save"]
    assert [(sample.run, sample.step, sample.seconds, sample.ranks) for sample in samples] == [
        (0, 5, 0.011, 2),
        (0, 10, 0.011, 2),
        (1, 5, 0.021, 2),
        (1, 10, 0.021, 2),
    ]


def test_logs_of_different_ranks_are_one_run_with_the_slowest_of_them(tmp_path: Path) -> None:
    logs = [save_line(rank, 5, 10.0 + rank) + save_line(rank, 10, 20.0 + rank) for rank in (1, 0, 2)]
    logs[2] += iteration(5) + block(30, 31)
    timings = parsed(tmp_path, "x", logs)
    samples = timings.timers["flashpoint-save"]
    assert [(sample.run, sample.step, sample.seconds, sample.ranks) for sample in samples] == [
        (0, 5, 0.012, 3),
        (0, 10, 0.022, 3),
    ]
    assert [sample.seconds for sample in timings.timers["save-checkpoint"]] == [0.031]


def test_it_does_not_matter_in_which_order_the_ranks_logs_are_given(tmp_path: Path) -> None:
    logs = [save_line(rank, 5, 10.0 + 7 * rank % 3) + save_line(rank, 10, 20.0 - rank) for rank in range(4)]
    results = []
    for number, order in enumerate(((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 0, 1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        results.append(parsed(folder, "x", [logs[rank] for rank in order]).timers)
    assert results[0] == results[1] == results[2]


def test_a_save_that_failed_on_a_rank_is_no_sample_and_is_told(tmp_path: Path) -> None:
    log = save_line(0, 5, 10.0) + save_line(0, 10, 1.0, ok=False) + save_line(0, 15, 1.0, skipped=True)
    timings = parsed(tmp_path, "x", [log])
    assert len(timings.timers["flashpoint-save"]) == 1
    assert (timings.failed, timings.skipped) == ({"flashpoint-save": 1}, {"flashpoint-save": 1})
    assert any("1 saves failed" in note for note in timings.notes)


def test_a_label_without_a_save_that_went_well_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="no save of 'x' went well"):
        parsed(tmp_path, "x", [save_line(0, 5, 10.0, ok=False)])


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match=r"the log is empty.*x0\.log"):
        parsed(tmp_path, "x", [""])


def test_a_log_of_something_else_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match=r"no checkpoint timing in 50 lines.*needed: timer blocks"):
        parsed(tmp_path, "x", ["hello: world\n" * 50])


def test_a_log_of_a_resumed_job_that_saved_nothing_says_so(tmp_path: Path) -> None:
    line = "  successfully loaded checkpoint from /ckpt [ t 1/1, p 1/1 ] at iteration 25\n"
    with pytest.raises(TimingsError, match=r"resumed from step 25.*a save folder of its own"):
        parsed(tmp_path, "x", [line])


def test_a_log_whose_level_hides_the_timers_says_so(tmp_path: Path) -> None:
    """From core 0.16 on the timers log at INFO; with logging_level WARNING only the saves themselves are told of."""
    hidden = ("timers", "  save-checkpoint", "    save-checkpoint", "  model-", "    model-", "    train/")
    lines = (LOGS / "bridge-0.6.2-minmax.log").read_text().splitlines()
    log = "\n".join(line for line in lines if not any(word in line for word in hidden))
    with pytest.raises(TimingsError, match=r"tells of \d+ saves, but not how long.*logging_level to 20"):
        parsed(tmp_path, "x", [log])


def test_logs_of_ranks_that_log_no_timings_can_be_passed_over(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("nothing\n")
    (tmp_path / "1.log").write_text(_run(10))
    paths = [str(tmp_path / "0.log"), str(tmp_path / "1.log")]
    with pytest.raises(TimingsError, match="--skip-empty"):
        parse("x", paths)
    timings = parse("x", paths, skip_empty=True)
    assert len(timings.timers["save-checkpoint"]) == 4
    assert any("0.log: no checkpoint timing in 1 lines" in note for note in timings.notes)


def test_only_logs_without_timings_are_refused_even_then(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("nothing\n")
    with pytest.raises(TimingsError, match=r"none of the logs.*0\.log: no checkpoint timing in 1 lines"):
        parse("x", [str(tmp_path / "0.log")], skip_empty=True)


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (_PARAMETERS.format(8_030_261_248), _PARAMETERS.format(70_553_706_496), "parameters"),
        (
            "using world size: 8, data-parallel size: 8, ...\n",
            "using world size: 16, data-parallel size: 16, ...\n",
            "world size",
        ),
        (
            'mlflashpoint ab {"arm": "baseline", "repeat": 1}\n',
            'mlflashpoint ab {"arm": "other", "repeat": 1}\n',
            "arm",
        ),
        ("", (LOGS / "nemo-2.7.3.log").read_text(), "framework"),
    ],
)
def test_two_logs_of_different_jobs_under_one_label_are_refused(
    tmp_path: Path, one: str, other: str, what: str
) -> None:
    second = other if what == "framework" else other + _run(20)
    with pytest.raises(TimingsError, match=f"different jobs under the label 'x': {what}.*x0.log.*x1.log"):
        parsed(tmp_path, "x", [one + _run(10), second])


def test_two_runs_of_one_job_are_not(tmp_path: Path) -> None:
    start = _PARAMETERS.format(8_030_261_248)
    assert len(parsed(tmp_path, "x", [start + _run(10), start + _run(20)]).timers["save-checkpoint"]) == 8


def test_a_log_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(_run(10))
    (tmp_path / "link.log").symlink_to(path)
    for other in (path, tmp_path / "link.log"):
        with pytest.raises(TimingsError, match="given twice"):
            parse("x", [str(path), str(other)])


def test_a_copy_of_a_log_is_refused_also_if_it_is_packed_labelled_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(_run(10, 9))
    for copy in (
        gzip.compress(_run(10, 9).encode()),
        "".join(f"7: {line}\n" for line in _run(10, 9).splitlines()).encode(),
        _run(10, 5).encode(),
    ):
        (tmp_path / "b.log").write_bytes(copy)
        with pytest.raises(TimingsError, match="would count twice"):
            parse("x", [str(path), str(tmp_path / "b.log")])


def test_two_runs_of_one_arm_are_no_copies_whatever_their_numbers(tmp_path: Path) -> None:
    logs = [f'mlflashpoint ab {{"arm": "x", "run": "ab1-x-r{number}"}}\n' + _run(10) for number in (1, 2)]
    assert len(parsed(tmp_path, "x", logs).timers["save-checkpoint"]) == 8


def test_other_timers_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(_run(10) + block(1, 2, "evaluate"))
    assert list(parse("x", [str(path)], timers=["eval*"]).timers) == ["evaluate"]


def test_what_was_left_out_is_told_for_each_log(tmp_path: Path) -> None:
    log = _run(10) * 2 + block(1, 2).split("\n", 1)[1].replace("2.00)", "2.0") + "x" * 100_000 + " across ranks\n"
    source = parsed(tmp_path, "x", ["  cut ....: (1.00, 2.00)\n" + log]).sources[0]
    assert (source.samples, source.duplicates, source.torn, source.overlong) == (4, 4, 2, 1)


def test_a_label_can_be_written_and_read_again(tmp_path: Path) -> None:
    timings = parse("x", [str(LOGS / "bridge-0.6.2-minmax.log")])
    assert TimingSet.from_json(timings.to_json()) == timings


def test_the_first_saves_of_each_run_can_be_left_out(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_run(10), _run(20)]).without_first(3)
    assert [(sample.run, sample.step) for sample in timings.timers["save-checkpoint"]] == [(0, 4), (1, 4)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "not a whole JSON file"),
        (lambda text: "", "not a whole JSON file"),
        (lambda text: "[]", "not a result of"),
        (lambda text: '{"hello": 1}', "not a result of"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "format version 2 is not 1"),
        (lambda text: text.replace('"seconds": 0', '"seconds": -0'), "damaged result"),
        (lambda text: text.replace('"seconds": 0', '"seconds": 1e999, "other": 0'), "damaged result"),
        (lambda text: text.replace('"run": 0', '"run": "0"'), "damaged result"),
        (lambda text: text.replace('"label": "x"', '"label": 7'), "damaged result"),
        (lambda text: "[" * 100_000, "not a whole JSON file"),
    ],
)
def test_a_damaged_result_is_refused(change: object, reason: str) -> None:
    text = parse("x", [str(LOGS / "core-0.19.2-max.log")]).to_json()
    assert callable(change)
    with pytest.raises(TimingsError, match=reason):
        TimingSet.from_json(change(text))


@pytest.mark.parametrize("saves", [1, 2])
def test_one_save_that_is_in_two_logs_is_noticed(tmp_path: Path, saves: int) -> None:
    with pytest.raises(TimingsError, match="would count twice"):
        parsed(tmp_path, "x", [_run(10, saves), _run(10, saves)])
    labelled = "".join(f"7: {line}\n" for line in _run(10, saves).splitlines())
    for other in (labelled, "start\n" + _run(10, saves)):
        timings = parsed(tmp_path, "x", [_run(10, saves), other])
        assert any("if one is a copy of the other" in note for note in timings.notes)


def test_equal_coarse_times_of_two_runs_are_noted_only_if_the_logs_are_equal(tmp_path: Path) -> None:
    table = "========================= Step 2/10 =========================\n  • checkpointing: 1.25s\n"
    timings = parsed(tmp_path, "x", [table, table])
    assert len(timings.timers["checkpointing"]) == 2
    assert any("if one is a copy of the other" in note for note in timings.notes)
    assert parsed(tmp_path, "x", [table, "other\n" + table]).notes == ()


@pytest.mark.parametrize("pattern", ["nosuch*", "", "["])
def test_a_pattern_that_matches_no_timer_is_told_with_the_timers_that_there_are(tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "a.log"
    path.write_text("  successfully saved checkpoint from iteration 5\n" + _run(10) + block(1, 2, "evaluate"))
    with pytest.raises(
        TimingsError, match=r"of a timer that matches '.*those that it has: evaluate, save-checkpoint"
    ) as error:
        parse("x", [str(path)], timers=[pattern])
    assert "logging_level" not in str(error.value)


def test_trainings_of_different_lengths_under_one_label_are_noted(tmp_path: Path) -> None:
    timings = parsed(tmp_path, "x", [_run(10), _run(20), _run(30).replace("/     100", "/     500")])
    (note,) = timings.notes
    assert "different lengths: 100 steps in" in note
    assert "500 steps in" in note
    assert "x1.log" not in note


def test_blocks_in_a_form_that_is_not_understood_are_not_blamed_on_the_level(tmp_path: Path) -> None:
    wrapped = "".join(f"<record>{line}</record>\n" for line in _run(10).splitlines())
    with pytest.raises(TimingsError, match=r"4 lines hold timer blocks in a form.*as the job wrote it") as error:
        parsed(tmp_path, "x", ["  successfully saved checkpoint from iteration 5\n" + wrapped])
    assert "logging_level" not in str(error.value)
