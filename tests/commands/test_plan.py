"""``mlflashpoint plan`` answers in text and JSON, and refuses bad input in one line."""

from __future__ import annotations

import json

import pytest

from mlflashpoint import cli

GOOD = {
    "--nodes": "128",
    "--ranks-per-node": "8",
    "--bytes-per-rank": "20GiB",
    "--tmpfs": "1TiB",
    "--replicas": "1",
    "--mtbf-hours": "20000",
    "--step-seconds": "12",
    "--bandwidth": "50GB/s",
}


def run(*more, **changes):
    flags = {**GOOD, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
    return cli.main(["plan", *(part for flag in flags.items() if flag[1] is not None for part in flag), *more])


def test_text_answers_every_question(capsys):
    assert run("--nodes-per-domain", "8", "--durable-every-n-steps", "500", "--blocking-seconds", "2") == 0
    text = capsys.readouterr().out
    for part in (
        "800.00 GiB of 1.00 TiB (78%): fits",
        "replication",
        "Young/Daly",
        "lost per failure",
        "from durable storage",
        "2 nodes at once",
        "2 failure domains at once",
    ):
        assert part in text
    assert "warning" not in text and "assumed" not in text


def test_json_has_the_same_numbers_in_bytes_and_seconds(capsys):
    assert run("--json", "--save-every-n-steps", "10") == 0
    answer = json.loads(capsys.readouterr().out)
    plan = answer["plan"]
    assert plan["memory_bytes"] == 800 * 2**30 and plan["fits"] is True and plan["interval_steps"] == 10
    assert plan["node_loss"]["1"]["probability"] == 0 < plan["node_loss"]["2"]["probability"] < 0.02
    assert answer["job"]["nodes"] == 128 and answer["blocking_assumed"] is True


def test_an_assumed_blocking_time_says_that_it_is_assumed(capsys):
    assert run("--stage-bandwidth", "20GiB/s") == 0
    assert "a save holds up training  1 s (assumed)" in capsys.readouterr().out


def test_a_store_that_does_not_fit_is_told_loudly(capsys):
    assert run(tmpfs="100GiB") == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nodes": "0"}, "--nodes"),
        ({"nodes": "many"}, "'many'"),
        ({"bytes_per_rank": "20 bananas"}, "20 bananas"),
        ({"tmpfs": "-1"}, "--tmpfs"),
        ({"mtbf_hours": "0"}, "--mtbf-hours"),
        ({"step_seconds": "nan"}, "--step-seconds"),
        ({"bandwidth": "fast"}, "'fast'"),
        ({"replicas": "-1"}, "--replicas"),
        ({"replicas": "1.5"}, "1.5"),
        ({"nodes": None}, "--nodes"),
        ({"nodes": "1000000"}, "4,000,000"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(changes, named, capsys):
    try:
        code = run(**changes)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("mlflashpoint plan: ") and named in captured.err
