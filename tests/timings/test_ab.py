"""``mlflashpoint ab`` with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlflashpoint.timings import ab
from mlflashpoint.timings.samples import TimingSet
from tests.timings.helpers import environ, mlflashpoint

pytestmark = pytest.mark.multiprocess

_JOB = Path(__file__).with_name("job.py")
_COMMAND = ("--", sys.executable, _JOB)


def _ab(tmp_path: Path, *arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    return mlflashpoint("ab", *arguments, *_COMMAND, cwd=tmp_path, **more)  # type: ignore[arg-type]


def _states(folder: Path) -> list[tuple[str, str]]:
    return [(run["run"], run["state"]) for run in json.loads((folder / "runs.json").read_text())["runs"]]


def _wait_for(path: Path, text: str, deadline_s: float = 30) -> None:
    deadline = time.monotonic() + deadline_s
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"no {text!r} in {path}"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_arms_run_in_turn_apart_and_are_compared(tmp_path: Path) -> None:
    show = "SHOW=MLFLASHPOINT_ENABLED MLFLASHPOINT_JOB_ID MLFLASHPOINT_BRIDGE_MODE HOME SAVE"
    done = mlflashpoint(
        "ab",
        *("--arm", "baseline", "MLFLASHPOINT_BRIDGE_MODE=observe", show, "SAVE=/ckpt/{run}"),
        *("--arm", "flashpoint", "STALL_MS=101", show),
        *("--repeat", "2", "--output", "out", "--headline", "--substitute", "save-checkpoint"),
        *("--", sys.executable, _JOB, "--save={run}"),
        cwd=tmp_path,
        env={"HOME": "/home/me"},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out"
    assert _states(folder) == [
        (name, "done") for name in ("baseline-r1", "flashpoint-r1", "flashpoint-r2", "baseline-r2")
    ]
    first = (folder / "logs" / "baseline-r1.log").read_text()
    assert first.startswith('mlflashpoint ab {"arm": "baseline", "run": "ab')
    for line in (
        "MLFLASHPOINT_ENABLED=1",
        "MLFLASHPOINT_BRIDGE_MODE=observe",
        "HOME=/home/me",
        "SAVE=/ckpt/baseline-r1",
        "arguments: --save=baseline-r1",
    ):
        assert f"\n{line}\n" in first
    second = (folder / "logs" / "flashpoint-r2.log").read_text()
    assert "\nMLFLASHPOINT_BRIDGE_MODE=None\n" in second
    jobs = {line for log in (folder / "logs").iterdir() for line in log.read_text().splitlines() if "_JOB_ID=" in line}
    assert len(jobs) == 4
    timings = {label: TimingSet.read(folder / f"{label}.json") for label in ("baseline", "flashpoint")}
    samples = timings["flashpoint"].timers["save-checkpoint"]
    assert [(sample.run, sample.step) for sample in samples] == [(run, step) for run in (0, 1) for step in range(1, 6)]
    assert "save-checkpoint (control)  baseline    10" in done.stdout
    assert "only in replace mode" in done.stdout
    assert json.loads((folder / "report-flashpoint.json").read_text())["valid"]
    for kind, start in (("md", "| timer |"), ("html", "<!doctype html>")):
        assert (folder / f"report-flashpoint.{kind}").read_text().startswith(start)
    for line in ("[1/4] baseline-r1: started", "[3/4] flashpoint-r2: done after", "logs and results are in out"):
        assert line in done.stderr


def test_a_third_arm_is_compared_with_the_first(tmp_path: Path) -> None:
    done = _ab(tmp_path, "--arm", "a", "--arm", "b", "--arm", "c", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("report-*.md")) == ["report-b.md", "report-c.md"]


def test_an_arm_that_fails_is_said_clearly_and_the_rest_is_left_out(tmp_path: Path) -> None:
    done = _ab(tmp_path, "--arm", "a", "--arm", "b", "FAIL=7", "--repeat", "2", "--output", "out")
    assert done.returncode == 1
    assert "b-r1 failed: exit code 7; the end of out/logs/b-r1.log:" in done.stderr
    assert "  |     save-checkpoint ......" in done.stderr
    assert "the other 2 runs are left out" in done.stderr
    assert "no run of b is done" in done.stderr
    assert _states(tmp_path / "out") == [("a-r1", "done"), ("b-r1", "failed")]
    # what is done can be used
    assert len(TimingSet.read(tmp_path / "out" / "a.json").timers["save-checkpoint"]) == 5


@pytest.mark.parametrize(("change", "told"), [((), True), (("SILENT=1",), False)])
def test_the_log_of_a_failed_run_is_offered_if_it_holds_timings(
    tmp_path: Path, change: tuple[str, ...], told: bool
) -> None:
    done = _ab(tmp_path, "--arm", "a", "FAIL=7", *change, "--arm", "b", "--output", "out")
    assert ("a-r1 is left out; to use the 5 timings in its log: mlflashpoint timings parse" in done.stderr) == told
    assert ("is left out" in done.stderr) == told


def test_the_other_runs_go_on_if_that_is_asked_for(tmp_path: Path) -> None:
    done = _ab(tmp_path, "--arm", "a", "FAIL=7", "--arm", "b", "--repeat", "2", "--output", "out", "--keep-going")
    assert done.returncode == 1
    assert [state for _, state in _states(tmp_path / "out")] == ["failed", "done", "done", "failed"]


def test_an_arm_that_logs_no_timings_is_a_failure(tmp_path: Path) -> None:
    done = mlflashpoint("ab", "--arm", "a", "--arm", "b", "--output", "out", "--", "true", cwd=tmp_path)
    assert done.returncode == 1
    for run in ("a-r1", "b-r1"):
        assert f"out/logs/{run}.log: no checkpoint timing in 1 lines" in done.stderr
    assert "--skip-empty" not in done.stderr


def test_one_run_without_timings_is_named_and_does_not_cost_the_comparison(tmp_path: Path) -> None:
    script = f'test $REPEAT = 2 && export SILENT=1; exec "{sys.executable}" "{_JOB}"'
    arms = ("--arm", "a", "REPEAT={repeat}", "--arm", "b", "REPEAT=1", "--repeat", "2", "--output", "out")
    done = mlflashpoint("ab", *arms, "--", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 1
    assert "a: out/logs/a-r2.log: no checkpoint timing in" in done.stderr
    assert "--skip-empty" not in done.stderr
    assert re.search(r"save-checkpoint \(control\) +a +5 ", done.stdout)
    assert (tmp_path / "out" / "report-b.html").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--control", "x-checkpoint"), "no timer 'x-checkpoint' in 'a'"),
        (("--headline",), "no headline: no timer of memory saves in 'b'"),
        (("--headline", "--durable", "y"), "no headline: no timer 'y' in 'a'"),
        (("--skip-first", "9"), "no sample of 'a' is left"),
    ],
)
def test_a_mistake_in_how_to_compare_costs_that_part_alone(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = _ab(tmp_path, "--arm", "a", "--arm", "b", "--output", "out", "--tolerance", "5", *options)
    assert done.returncode == 1
    assert said in done.stderr
    again = "mlflashpoint timings compare --baseline out/a.json --candidate out/b.json"
    assert re.search(rf"{again}.* --tolerance 5.0", done.stderr)
    assert f"{again} --durable" not in done.stderr
    assert re.search(r"save-checkpoint.* a +5 ", done.stdout)
    for kind in ("json", "md", "html"):
        assert (tmp_path / "out" / f"report-b.{kind}").exists()


@pytest.mark.parametrize("how", ["closed", "ascii", "full"])
def test_all_reports_are_written_whatever_becomes_of_the_table(tmp_path: Path, how: str) -> None:
    arms = ("--arm", "a", "--arm", "b", "--arm", "c", "--output", "out")
    command = [sys.executable, "-m", "mlflashpoint.cli", "ab", *arms, *map(str, _COMMAND)]
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ({"PYTHONIOENCODING": "ascii"} if how == "ascii" else {}),
        stdout={"closed": writer, "full": full}.get(how, subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    os.close(full)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == (1 if how == "full" else 0), done.stderr
    assert ("No space left" in done.stderr) == (how == "full")
    assert len(list((tmp_path / "out").glob("report-*"))) == 6


def test_what_a_failed_run_printed_can_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    script = "printf 'evil \\033]0;title\\007 \\233 \\302\\233 \\377 \\342\\200\\256 end\\n'; exit 1"
    done = subprocess.run(
        [sys.executable, "-m", "mlflashpoint.cli", "ab", "--arm", "a", "--arm", "b", "--", "sh", "-c", script],
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        timeout=60,
    )
    text = done.stderr.decode()
    assert "| evil " in text
    assert not [
        mark for mark in text if mark != "\n" and (ord(mark) < 32 or 127 <= ord(mark) < 160 or mark == "\u202e")
    ]


def test_bytes_that_are_no_unicode_can_stand_in_every_argument(tmp_path: Path) -> None:
    arms = ("--arm", "a", "X=\udcff", "--arm", "b", "--output", "out\udcff")
    assert _ab(tmp_path, *arms, "--dry-run").returncode == 0
    done = _ab(tmp_path, *arms)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out\udcff" / "report-b.html").exists()
    done = mlflashpoint("ab", "--arm", "a\udcff", "--arm", "b", "--", "true", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_control_that_differs_has_exit_code_3(tmp_path: Path) -> None:
    done = _ab(tmp_path, "--arm", "a", "--arm", "b", "STALL_MS=200", "--output", "out")
    assert done.returncode == 3
    assert "INVALID" in done.stdout


def test_a_run_is_stopped_at_its_deadline(tmp_path: Path) -> None:
    done = _ab(tmp_path, "--arm", "a", "HANG=600", "--arm", "b", "--output", "out", "--deadline-s", "2")
    assert done.returncode == 1
    assert "a-r1 was stopped at its deadline of 2s;" in done.stderr
    assert "after 2s after" not in done.stderr


def test_what_a_run_leaves_behind_is_stopped_before_the_next_one(tmp_path: Path) -> None:
    note = tmp_path / "orphan"
    done = _ab(tmp_path, "--arm", "a", f"ORPHAN={note}", "--arm", "b", "--output", "out", "--grace-s", "0.5")
    assert done.returncode == 0, done.stderr
    assert "a-r1: done (1 processes it left behind were stopped)" in done.stderr
    assert not _alive(int(note.read_text()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_stops_the_job_and_keeps_what_is_done(tmp_path: Path, number: int, code: int) -> None:
    """A terminal's Ctrl-C goes to the whole foreground process group, which is what happens here."""
    note = tmp_path / "orphan"
    arms = ("--arm", "a", "--arm", "b", "HANG=600", f"ORPHAN={note}", "--output", "out", "--grace-s", "2")
    command = [sys.executable, "-m", "mlflashpoint.cli", "ab", *arms, *map(str, _COMMAND)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for(tmp_path / "out" / "logs" / "b-r1.log", "hanging")
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, errors
    assert "interrupted" in errors
    assert not _alive(int(note.read_text()))
    folder = tmp_path / "out"
    assert _states(folder) == [("a-r1", "done"), ("b-r1", "interrupted")]
    assert len(TimingSet.read(folder / "a.json").timers["save-checkpoint"]) == 5
    # the interrupted run's log can be parsed by hand
    by_hand = "timings parse --label b out/logs/b-r1.log"
    assert f"b-r1 is left out; to use the 5 timings in its log: mlflashpoint {by_hand}\n" in errors
    done = mlflashpoint(*by_hand.split(), "--output", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.tmp"))


def _started(tmp_path: Path, arms: tuple[str, ...], ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlflashpoint.cli", "ab", *arms, "--output", "out", *map(str, _COMMAND)]

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=ignore,
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path, number: int) -> None:
    """As ``nohup`` does with SIGHUP, and a shell's ``&`` with SIGINT."""
    process = _started(tmp_path, ("--arm", "a", "HANG=2", "--arm", "b"), (number,))
    try:
        _wait_for(tmp_path / "out" / "logs" / "a-r1.log", "hanging")
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors


def test_where_the_job_ignores_an_interrupt_it_is_terminated_without_waiting(tmp_path: Path) -> None:
    """A shell's ``&`` starts what it starts with SIGINT ignored."""
    process = _started(tmp_path, ("--arm", "a", "HANG=600", "--arm", "b", "--grace-s", "60"), (signal.SIGINT,))
    try:
        _wait_for(tmp_path / "out" / "logs" / "a-r1.log", "hanging")
        os.kill(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, errors


def test_the_default_patience_with_a_deaf_job_is_shorter_than_a_schedulers() -> None:
    """Slurm and Kubernetes give 30 seconds; the comparison of what is done needs some of them."""
    assert 3 * ab._parser().parse_args(["--arm", "a"]).grace_s <= 25


def test_a_hangup_has_its_exit_code_in_the_help(tmp_path: Path) -> None:
    process = _started(tmp_path, ("--arm", "a", "HANG=600", "--arm", "b", "--grace-s", "2"))
    try:
        _wait_for(tmp_path / "out" / "logs" / "a-r1.log", "hanging")
        os.kill(process.pid, signal.SIGHUP)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 129
    assert "129, 130 or 143 interrupted" in mlflashpoint("ab", "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize("pause", [0.01, 0.15])
def test_however_often_it_is_interrupted_no_process_of_the_job_is_left(tmp_path: Path, pause: float) -> None:
    note = tmp_path / "orphan"
    # the job itself does not listen to anything but SIGKILL either
    arms = ("--arm", "a", "HANG=600", "DEAF=1", f"ORPHAN={note}", "--arm", "b", "--grace-s", "30")
    process = _started(tmp_path, arms)
    log = tmp_path / "out" / "logs" / "a-r1.log"
    try:
        _wait_for(log, "hanging")
        job = int(next(line for line in log.read_text().splitlines() if line.startswith("pid=")).partition("=")[2])
        began = time.monotonic()
        for _ in range(12):
            process.send_signal(signal.SIGINT)
            time.sleep(pause)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert not _alive(int(note.read_text()))
    assert not _alive(job)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    # the second one cut the patience short
    assert time.monotonic() - began < 25
    assert _states(tmp_path / "out") == [("a-r1", "interrupted")]


def test_a_job_does_not_outlive_the_command_that_runs_it(tmp_path: Path) -> None:
    script = "echo $$ > pid; echo hanging; exec sleep 600"
    command = [sys.executable, "-m", "mlflashpoint.cli", "ab", "--arm", "a", "--arm", "b", "--output", "out"]
    process = subprocess.Popen(
        [*command, "--", "sh", "-c", script], cwd=tmp_path, env=environ(), stderr=subprocess.DEVNULL
    )
    _wait_for(tmp_path / "out" / "logs" / "a-r1.log", "hanging")
    process.kill()
    process.wait(30)
    deadline = time.monotonic() + 10
    while _alive(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_memory_of_a_run_is_given_back(tmp_path: Path) -> None:
    script = (
        "mkdir -p $MLFLASHPOINT_BASE_CONTAINER && "
        'echo "{\\"job_id\\": \\"$MLFLASHPOINT_JOB_ID\\"}" > $MLFLASHPOINT_BASE_CONTAINER/container.json'
    )
    base = tmp_path / "memory"
    for more, left in (((), 0), (("--keep-memory",), 2)):
        mlflashpoint(
            *("ab", "--arm", "a", "--arm", "b", "--output", f"out{left}", *more, "--", "sh", "-c", script),
            cwd=tmp_path,
            env={"MLFLASHPOINT_BASE_CONTAINER": str(base)},
        )
        assert len(list(base.iterdir())) == left


def test_a_folder_that_is_not_the_runs_own_is_left_alone(tmp_path: Path) -> None:
    base = tmp_path / "memory"
    base.mkdir()
    (base / "container.json").write_text('{"job_id": "somebody-else"}')
    done = _ab(tmp_path, "--arm", "a", f"MLFLASHPOINT_BASE_CONTAINER={base}", "--arm", "b", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert (base / "container.json").exists()


def test_the_runs_can_be_shown_without_running_them(tmp_path: Path) -> None:
    done = _ab(tmp_path, "--arm", "a", "X=a b", "--arm", "b", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# a-r1\n")
    assert "X='a b'" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "needs two arms"),
        (("--arm", "a"), "needs two arms"),
        (("--arm", "a", "--arm", "a", "X=1"), "the label 'a' is used twice"),
        (("--arm", "a", "--arm", "A"), "is used twice"),
        (("--arm", "../a", "--arm", "b"), "is no label"),
        (("--arm", "a", "--arm", "Runs"), "a file of mlflashpoint ab"),
        (("--arm", "report-a", "--arm", "b"), "a file of mlflashpoint ab"),
        (("--arm", "logs", "--arm", "b"), "a file of mlflashpoint ab"),
        (("--arm", "a", "--arm", "é" * 64), "is no label"),
        (("--arm", "a", "MLFLASHPOINT_SAVE_EVERY_N_STEPS={arm}", "--arm", "b"), "not a whole number"),
        (("--arm", "a", "MLFLASHPOINT_BRIDGE_MODE={x}", "--arm", "b"), "not a known choice"),
        (("--arm", "a", "--arm", "b", "--durable", "x"), "--headline"),
        (("--arm", "a", "--arm", "b", "--output", "n" * 300), "File name too long"),
        (("--arm", "a", "--arm", "b", "--output", "-"), "standard output is taken"),
        (("--arm", "a", "MLFLASHPOINT_BRIDGE_MODES=observe", "--arm", "b"), "did you mean"),
        (("--arm", "a", "--arm", "b", "--repeat", "0"), "not a whole number from 1"),
        (("--arm", "a", "--arm", "b", "--repeat", "1001"), "'1001' is not a whole number from 1 to 1000"),
        (("--arm", "a", "--arm", "b", "--repeat", "1000000000", "--dry-run"), "not a whole number from 1 to 1000"),
        (("--arm", "a", "--arm", "b", "--output", "full"), "the output folder is not empty"),
    ],
)
def test_bad_arguments_are_one_line_and_nothing_runs(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = _ab(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("mlflashpoint ab: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((), "no launch command"),
        (("--", "no-such-program"), "the command 'no-such-program' is not found"),
        (("--", "./no-such-program"), "the command './no-such-program' is not found"),
        (("--", "./plain"), "the command './plain' is not executable; remedy: chmod +x"),
        (("--", "plain"), "the command 'plain' is not executable; remedy: chmod +x"),
        (("--", "./folder"), "the command './folder' is a folder"),
    ],
)
def test_a_command_that_can_not_be_started_is_refused(tmp_path: Path, command: tuple[str, ...], reason: str) -> None:
    (tmp_path / "plain").touch(0o644)
    (tmp_path / "folder").mkdir()
    path = f"{os.environ['PATH']}:{tmp_path}"
    done = mlflashpoint("ab", "--arm", "a", "--arm", "b", *command, cwd=tmp_path, env={"PATH": path})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert reason in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "plain"]


def test_a_disk_that_gets_full_in_between_is_one_line(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from mlflashpoint.timings import ab, experiment; create = experiment.Experiment.run\n"
        "def run(self, *given, **more):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20)); return create(self, *given, **more)\n"
        "experiment.Experiment.run = run; sys.exit(ab.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-B", "-c", program, "--arm", "a", "--arm", "b", "--output", "out", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "File too large" in done.stderr


@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_gets_full_does_not_cost_the_comparison_of_what_is_done(tmp_path: Path, lasting: bool) -> None:
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from mlflashpoint.timings import ab, experiment; create = experiment.Experiment.run\n"
        "limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "def run(self, run, *given, **more):\n"
        "    if run.repeat == 2: limit(20)\n"
        "    try: return create(self, run, *given, **more)\n"
        f"    finally: limit(20 if run.repeat == 2 and {lasting} else resource.RLIM_INFINITY)\n"
        "experiment.Experiment.run = run; sys.exit(ab.main(sys.argv[1:]))"
    )
    arms = ("--arm", "a", "--arm", "b", "--repeat", "2", "--keep-going", "--output", "out")
    command = [sys.executable, "-B", "-c", program, *arms, *map(str, _COMMAND)]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "File too large [path out/runs.json] in b-r2; comparing what is done" in done.stderr
    assert re.search(r"save-checkpoint \(control\) +a +5 ", done.stdout), done.stderr
    assert "Traceback" not in done.stderr
    assert ("can't write the output: File too large [path out/report-b.html]" in done.stderr) == lasting
    assert ("out/runs.json does not tell of the last run's end" in done.stderr) == lasting
    assert (tmp_path / "out" / "report-b.html").exists() != lasting
    if not lasting:
        assert _states(tmp_path / "out") == [("a-r1", "done"), ("b-r1", "done"), ("b-r2", "failed")]
