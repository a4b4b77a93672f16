"""``mlflashpoint timings`` as a user meets it: exit codes, one line per error, files whole or not at all."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from mlflashpoint.timings.command import main
from tests.timings.helpers import LOGS, block, environ, iteration, mlflashpoint, timing_set

_BRIDGE = LOGS / "bridge-0.6.2-minmax.log"


def _compared(tmp_path: Path, *options: object, control: float = 18.4) -> subprocess.CompletedProcess[str]:
    memory = {"save-checkpoint-non-persistent": [0.6, 0.61, 0.62]}
    for label, durable, more in (("baseline", 18.3, {}), ("flashpoint", control, memory)):
        timers = {"save-checkpoint": [durable - 0.1, durable, durable + 0.12], **more}
        (tmp_path / f"{label}.json").write_text(timing_set(label, timers).to_json())
    files = ("--baseline", "baseline.json", "--candidate", "flashpoint.json")
    return mlflashpoint("timings", "compare", *files, *options, cwd=tmp_path)


def _assert_refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("mlflashpoint timings: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert reason in done.stderr


def test_logs_become_a_file_of_samples_and_two_files_a_table(tmp_path: Path) -> None:
    for label, log in (("baseline", LOGS / "bridge-0.5.1-minmax.log"), ("flashpoint", _BRIDGE)):
        done = mlflashpoint("timings", "parse", "--label", label, log, "--output", f"{label}.json", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files = ("--baseline", "baseline.json", "--candidate", "flashpoint.json")
    done = mlflashpoint("timings", "compare", *files, "--html", "report.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "save-checkpoint (control)       baseline    2" in done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["baseline.json", "flashpoint.json", "report.html"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_log_can_come_through_standard_input(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    done = mlflashpoint("timings", "parse", "--label", "x", "-", cwd=tmp_path, stdin=pack(_BRIDGE.read_bytes()))
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["timers"]["save-checkpoint-non-persistent"]) == 4


def test_a_hyphen_is_standard_output_as_it_is_standard_input(tmp_path: Path) -> None:
    done = mlflashpoint("timings", "parse", "--label", "x", _BRIDGE, "--output", "-", cwd=tmp_path)
    assert json.loads(done.stdout)["label"] == "x"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "b.json").write_text(timing_set("b", {"save-checkpoint": [0.1, 0.2]}).to_json())
    files = ("--baseline", "-", "--candidate", "b.json", "--output", "-")
    done = mlflashpoint("timings", "compare", *files, cwd=tmp_path, stdin=done.stdout.encode())
    assert done.returncode in (0, 3), done.stderr
    assert "save-checkpoint (control)" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_what_a_reader_has_to_know_goes_to_standard_error(tmp_path: Path) -> None:
    done = mlflashpoint("timings", "parse", "--label", "x", LOGS / "ray-deduplicated.log", cwd=tmp_path)
    assert done.returncode == 0
    assert "RAY_DEDUP_LOGS=0" in done.stderr
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "required: parse|compare"),
        (("parse",), "required: LOG, --label"),
        (("parse", "--label", "a", "--label", "b", _BRIDGE), "--label is given twice"),
        (("parse", "--label", "../a", _BRIDGE), "is no label"),
        (("parse", "--label", "a", "gone.log"), "No such file"),
        (("parse", "--label", "a", "empty.log"), "the log is empty"),
        (("parse", "--label", "a", "other.log"), "no checkpoint timing in 2 lines"),
        (("parse", "--label", "a", _BRIDGE, _BRIDGE), "given twice"),
        (("parse", "--label", "a", "-", "-"), "given twice"),
        (("parse", "--label", "a", _BRIDGE, LOGS / "nemo-2.7.3.log"), "different jobs"),
        (("parse", "--label", "a", "other.log", "--output", "other.log"), "the same file is named twice"),
        (("parse", "--label", "a", _BRIDGE, "--output", "no/such/folder.json"), "folder does not exist"),
        (("parse", "--label", "a", _BRIDGE, "--output", "."), "a folder is in the place"),
        (("compare", "--baseline", "a.json"), "required: --candidate"),
        (("compare", "--baseline", "a.json", "--candidate", "a.json"), "the same file is named twice"),
        (("compare", "--baseline", "a.json", "--candidate", "same-label.json"), "the label 'a' is used twice"),
        (("compare", "--baseline", "a.json", "--candidate", "cut.json"), "not a whole JSON file"),
        (("compare", "--baseline", "a.json", "--candidate", "gone.json"), "No such file"),
        (("compare", "--baseline", "a.json", "--candidate", "b.json", "--json", "--markdown"), "not allowed with"),
        (("compare", "--baseline", "a.json", "--candidate", "b.json", "--skip-first", "-1"), "not a whole number"),
        (("compare", "--baseline", "a.json", "--candidate", "b.json", "--control", "x"), "no timer 'x'"),
        (("compare", "--baseline", "a.json", "--candidate", "b.json", "--html", "b.json"), "named twice"),
        (("compare", "--baseline", "a.json", "--candidate", "b.json", "--html", "-"), "standard output is taken"),
        (("compare", "--baseline", "-", "--candidate", "-"), "the same file is named twice"),
        (("compare", "--baseline", "-", "--candidate", "b.json"), "not a whole JSON file"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_no_file(
    tmp_path: Path, arguments: tuple[object, ...], reason: str
) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "other.log").write_text("hello\nworld: 1\n")
    (tmp_path / "a.json").write_text(whole := timing_set("a", {"save-checkpoint": [1.0]}).to_json())
    (tmp_path / "same-label.json").write_text(whole)
    (tmp_path / "b.json").write_text(timing_set("b", {"save-checkpoint": [1.0]}).to_json())
    (tmp_path / "cut.json").write_text(whole[:-20])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _assert_refused(mlflashpoint("timings", *arguments, cwd=tmp_path), reason)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_output_that_is_there_already_is_kept_if_the_input_is_bad(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("precious")
    (tmp_path / "bad.log").write_text("nothing\n")
    done = mlflashpoint("timings", "parse", "--label", "a", "bad.log", "--output", "out.json", cwd=tmp_path)
    _assert_refused(done, "no checkpoint timing")
    assert (tmp_path / "out.json").read_text() == "precious"


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    """The process may write no file of more than 100 bytes: what happens when a disk is full, on any machine."""
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "from mlflashpoint.timings.command import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-B", "-c", program, "parse", "--label", "a", str(_BRIDGE), "--output", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=60)
    _assert_refused(done, "can't write the output: File too large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["--json", "--markdown"])
def test_other_forms_go_to_a_file_too(tmp_path: Path, form: str) -> None:
    shown = _compared(tmp_path, form)
    written = _compared(tmp_path, form, "--output", "table")
    assert (shown.returncode, written.returncode, written.stdout) == (0, 0, "")
    assert (tmp_path / "table").read_text() == shown.stdout != ""


def test_an_invalid_comparison_is_printed_and_has_exit_code_3(tmp_path: Path) -> None:
    done = _compared(tmp_path, "--html", "report.html", control=25.0)
    assert done.returncode == 3
    assert "INVALID: the control save-checkpoint differs by" in done.stdout
    assert "This comparison is invalid" in (tmp_path / "report.html").read_text()


def test_equal_seeds_give_equal_reports(tmp_path: Path) -> None:
    assert _compared(tmp_path, "--seed", 7).stdout == _compared(tmp_path, "--seed", 7).stdout


def test_a_terminal_without_unicode_gets_the_table_as_well(tmp_path: Path) -> None:
    _compared(tmp_path)
    files = ("--baseline", "baseline.json", "--candidate", "flashpoint.json")
    done = mlflashpoint("timings", "compare", *files, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "within its noise of ?0.9 %" in done.stdout or "noise of ?" in done.stdout


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "many.log"
    log.write_text("".join(iteration(step) + block(step, step + 1) for step in range(1, 3000)))
    command = [sys.executable, "-m", "mlflashpoint.cli", "timings", "parse", "--label", "x", str(log)]
    process = subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 0
    process.stderr.close()


def test_an_interrupt_while_it_waits_for_its_input_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("precious")
    command = [sys.executable, "-m", "mlflashpoint.cli", "timings", "parse", "--label", "a", "-"]
    # the input shows when the command waits for more of it: its pipe is empty then
    process = subprocess.Popen(
        [*command, "--output", "out.json"],
        env=environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(_BRIDGE.read_bytes())
        process.stdin.flush()
        deadline = time.monotonic() + 30
        while struct.unpack("i", fcntl.ioctl(process.stdin, termios.FIONREAD, b"1234"))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        shown = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert shown == (b"", b"")
    assert (tmp_path / "out.json").read_text() == "precious"


@pytest.mark.parametrize("command", ["ab", "timings"])
def test_an_interrupt_while_a_command_is_loaded_is_quiet(tmp_path: Path, command: str) -> None:
    program = (
        "import importlib, os, signal, sys; from mlflashpoint import cli\n"
        "importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    run = [sys.executable, "-c", program, command]
    done = subprocess.run(run, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_commands_work_without_torch_and_numpy(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None;"
        "import mlflashpoint.timings.ab; from mlflashpoint.timings.command import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "parse", "--label", "a", str(_BRIDGE)]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def _raw(
    tmp_path: Path, program: str, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command under a shell that redirects; ``$@`` is the command."""
    command = [sys.executable, "-m", "mlflashpoint.cli", "timings", *map(str, arguments)]
    done = subprocess.run(
        ["sh", "-c", program, "sh", *command], cwd=tmp_path, env=environ(env), capture_output=True, timeout=60
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('"$@" - <&-', "standard input is closed"),
        (f'"$@" {_BRIDGE} >/dev/full', "No space left"),
        (f'"$@" {_BRIDGE} >&-', "standard output is closed"),
        (f'ln -s loop loop; "$@" {_BRIDGE} --output loop', "symbolic links"),
        ('ln -s loop loop; "$@" loop', "symbolic links"),
        (f'"$@" {_BRIDGE} --output {"n" * 300}', "File name too long"),
        (f'"$@" {"n" * 300}', "File name too long"),
        (f'"$@" {_BRIDGE} --output /dev/full', "No space left"),
        (f'"$@" {_BRIDGE} --output /dev/stdout >&-', "can't write the output"),
        (f'"$@" {_BRIDGE} $(printf "gone\\377\\033[31m")', "No such file"),
    ],
)
def test_surroundings_that_do_not_work_are_one_line_and_exit_code_2(tmp_path: Path, program: str, reason: str) -> None:
    done = _raw(tmp_path, program, "parse", "--label", "x")
    _assert_refused(done, reason)
    assert "\x1b" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "loop"] == []


def test_an_error_that_nobody_can_read_is_an_exit_code(tmp_path: Path) -> None:
    for where in ("2>&-", "2>/dev/full"):
        assert _raw(tmp_path, f'"$@" gone {where}', "parse", "--label", "x").returncode == 2


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_log_whose_name_is_no_unicode_is_read_and_named(tmp_path: Path, encoding: str) -> None:
    name = os.fsdecode(b"log\xff\x1b")
    text = (
        iteration(1) + block(1, 2) + "  x checkpoint ...: (1.00, 2.00)\n    y-checkpoint ..............: (3.00, 1.00)\n"
    )
    (tmp_path / name).write_text(text)
    done = _raw(tmp_path, '"$@"', "parse", "--label", "x", name, "--output", "x", env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, "Traceback" in done.stderr, "\x1b" in done.stderr) == (0, False, False)
    assert json.loads((tmp_path / "x").read_text())["sources"][0]["path"] == name


@pytest.mark.parametrize(
    "change",
    [
        {"label": "\ud800\x1b[31m\n"},
        {"timers": {"\ud800checkpoint\n": [{"seconds": 1.0, "run": 0, "order": 0}]}},
        {"timers": {"checkpoint": [{"seconds": 1e308, "run": 0, "order": n} for n in range(3)]}},
        {"timers": {"checkpoint": [{"seconds": 5e-324 * 10**n, "run": 0, "order": n} for n in (0, 15)]}},
        {"timers": {"checkpoint": [{"seconds": 10**400, "run": 0, "order": 0}]}},
        {"timers": {"checkpoint": [{"seconds": 1, "run": 0, "order": 10**400}]}},
        {"timers": {"checkpoint": [{"seconds": 1, "run": 0, "order": 0, "step": 10**400}]}},
        {"timers": {"checkpoint": [{"seconds": 1, "run": 0, "order": n, "step": n * (2**53 - 1)} for n in (0, 1)]}},
        {"timers": {"checkpoint": [{"seconds": float("nan"), "run": 0, "order": 0}]}},
        {"timers": {"checkpoint": [{"seconds": 1, "run": 0, "order": 0, "least": 2}]}},
        {"timers": {"checkpoint": [7]}},
        {"timers": {}},
        {"timers": []},
        {"sources": [{"path": "x", "lines": "many", "samples": 1}]},
        {"sources": [{"path": 7, "lines": 1, "samples": 1}]},
        {"sources": [{"path": "x", "lines": 1, "samples": 1, "torn": None}]},
        {"sources": ["x"]},
        {"job": {"world_size": {"a": 1}}},
        {"job": {"world_size": [[[]]]}},
        {"notes": "note"},
        {"notes": [1]},
        {"failed": {"x": -1}},
    ],
    ids=str,
)
def test_an_edited_result_is_compared_or_refused_in_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    whole = json.loads(timing_set("a", {"save-checkpoint": [1.0, 2.0]}).to_json())
    (tmp_path / "a.json").write_text(json.dumps({**whole, **change}))
    (tmp_path / "b.json").write_text(timing_set("b", {"save-checkpoint": [1.0, 2.0]}).to_json())
    files = ("--baseline", tmp_path / "a.json", "--candidate", tmp_path / "b.json", "--html", tmp_path / "page")
    for form in ("--json", "--markdown", "--seed=0"):
        code = main(["compare", *map(str, files), "--output", str(tmp_path / "out"), form])
        assert code in (0, 2, 3)
        (tmp_path / "out").read_text() if code != 2 else None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unit": "ms"}, "format unit 'ms' is not 'seconds, maximum across ranks'"),
        ({"unit": None}, "format unit None is not 'seconds"),
        ({"version": True}, "format version True is not 1"),
        ({"version": 2}, "format version 2 is not 1"),
        ({"label": ""}, "'' is no label"),
        ({"label": "<script>"}, "'<script>' is no label"),
        ({"label": "a" * 10_000}, "… is no label"),
        ({"timers": []}, "timers: [] is no object"),
        ({"timers": {"": [{"seconds": 1, "run": 0, "order": 0}]}}, "a timer without a name"),
        ({"timers": {"x": [7]}}, "x: 7 is no object"),
        ({"timers": {"x": [{"seconds": 1, "order": 0}]}}, "'run' is missing"),
        ({"timers": {"x": [{"seconds": "1", "run": 0, "order": 0}]}}, "x: '1' is no time in seconds"),
        ({"sources": [{"path": "x"}]}, "'lines' is missing"),
        ({"sources": [{"path": "x", "lines": 1, "samples": 1, "more": 1}]}, "a log has no 'more'"),
        ({"notes": 1}, "notes: 1 is no list"),
    ],
    ids=str,
)
def test_a_result_that_can_not_be_used_is_refused_in_words_about_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], reason: str
) -> None:
    whole = json.loads(timing_set("a", {"save-checkpoint": [1.0, 2.0]}).to_json())
    (tmp_path / "a.json").write_text(json.dumps({**whole, **change}))
    (tmp_path / "b.json").write_text(timing_set("b", {"save-checkpoint": [1.0, 2.0]}).to_json())
    assert main(["compare", "--baseline", str(tmp_path / "a.json"), "--candidate", str(tmp_path / "b.json")]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert "Error" not in told
    assert "__" not in told
    assert len(told) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("text", ["[" * 200_000, "9" * 5000])
def test_a_result_without_end_is_refused_in_words_about_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    done = mlflashpoint("timings", "compare", "--baseline", "a.json", "--candidate", "a", cwd=tmp_path)
    _assert_refused(done, "not a whole JSON file (a number or the nesting in it has no end)")


def test_a_result_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    for label, mark in (("a", b"\xef\xbb\xbf"), ("b", b"")):
        text = timing_set(label, {"save-checkpoint": [1.0, 2.0]}).to_json()
        (tmp_path / f"{label}.json").write_bytes(mark + text.encode())
    done = mlflashpoint("timings", "compare", "--baseline", "a.json", "--candidate", "b.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
