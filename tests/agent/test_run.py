"""``python -m mlflashpoint.run`` is the same Python with the agent on: each row is compared with plain Python."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from mlflashpoint import run
from tests.agent.support import BOOTSTRAP, ROOT, Workspace, environment, python

HOOKED = "any(type(f).__module__ == 'mlflashpoint.agent.finder' for f in sys.meta_path)"

#: what a script can see of how it was started, but for the hook itself and the agent's own environment
LOOK = """
import os, sys
me = sys.modules["__main__"]
path = [entry for entry in sys.path if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
print(sys.argv, getattr(me, "__file__", None), me.__package__, type(me.__loader__).__name__)
print(me.__spec__ and me.__spec__.name)
print(__name__, path[:2], sys.orig_argv[1:], sys.flags)
"""


def launcher_environment(*path: Path | str, **extra: str) -> dict[str, str]:
    return environment(*path, ROOT, on=False, **extra)


def both(
    *arguments: str, cwd: Path, stdin: str | None = None, flags: tuple[str, ...] = ()
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of plain Python and of the launcher."""
    env = launcher_environment()
    plain = python(*flags, *arguments, env=env, cwd=cwd, stdin=stdin)
    ours = python(*flags, "-m", "mlflashpoint.run", *arguments, env=env, cwd=cwd, stdin=stdin)
    return [(done.returncode, done.stdout, done.stderr) for done in (plain, ours)]


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(LOOK)
    (tmp_path / "module.py").write_text(LOOK)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(LOOK)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(LOOK)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("script.py", "--flag", "-m", "value"),
        ("./script.py", "--help"),
        ("-m", "module", "-c", "x"),
        ("-m", "package", "--print-path"),
        ("-c", LOOK, "a", "-b"),
        ("folder", "a"),
        ("app.pyz", "a"),
        ("-", "a"),
        (),
        ("-u", "-X", "faulthandler", "-W", "ignore", "script.py"),
        ("-Bum", "module"),
        ("-Werror", "-Xutf8", "script.py"),
    ],
    ids=str,
)
def test_what_the_job_sees_of_its_start_is_what_plain_python_shows(scripts: Path, arguments: tuple[str, ...]) -> None:
    plain, ours = both(*arguments, cwd=scripts, stdin=LOOK)
    assert plain[0] == 0 and plain[1]
    assert ours == plain


@pytest.mark.parametrize(
    "flags",
    [
        ("-u",),
        ("-O", "-B"),
        ("-OO", "-b"),
        ("-W", "error", "-Wignore::UserWarning"),
        ("-X", "utf8=1", "-Xdev"),
        ("--check-hash-based-pycs", "always", "-s"),
        ("-uB",),
        ("-q", "-d"),
    ],
    ids=str,
)
def test_the_interpreters_options_are_kept(scripts: Path, flags: tuple[str, ...]) -> None:
    code = LOOK + "\nprint(sys.warnoptions, sorted(sys._xoptions.items()))"
    (scripts / "script.py").write_text(code)
    plain, ours = both("script.py", cwd=scripts, flags=flags)
    assert plain[0] == 0 and ours == plain


@pytest.mark.parametrize(
    ("orig_argv", "options"),
    [
        (["python", "-m", "mlflashpoint.run", "x"], []),
        (["python", "-u", "-m", "mlflashpoint.run", "-O"], ["-u"]),
        (["python", "-um", "mlflashpoint.run"], ["-u"]),
        (["python", "-Bummlflashpoint.run"], ["-Bu"]),
        (["python", "-X", "dev", "-W", "error", "-m", "mlflashpoint.run"], ["-X", "dev", "-W", "error"]),
        (["python", "-Xdev", "-Wmodule", "-m", "mlflashpoint.run"], ["-Xdev", "-Wmodule"]),
        (["python", "-uX", "m", "-m", "mlflashpoint.run"], ["-uX", "m"]),
        (
            ["python", "--check-hash-based-pycs", "never", "-m", "mlflashpoint.run"],
            ["--check-hash-based-pycs", "never"],
        ),
        (["python", "-O", "/a/mlflashpoint/run.py", "-m", "x"], ["-O"]),
    ],
    ids=str,
)
def test_options_are_told_from_the_launcher_in_every_spelling(orig_argv: list[str], options: list[str]) -> None:
    assert run.interpreter_options(orig_argv) == options


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", 3),
        ("1/0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(5)", 5),
        ("import sys; sys.exit('a message')", 1),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_exit_codes_and_tracebacks_are_pythons_own(tmp_path: Path, code: str, expected: int) -> None:
    (tmp_path / "script.py").write_text(code)
    plain, ours = both("script.py", cwd=tmp_path)
    assert plain[0] == expected and ours == plain


@pytest.mark.parametrize(("sent", "shell_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launched_job_ends_it_as_it_ends_python(tmp_path: Path, sent: int, shell_code: int) -> None:
    codes = []
    for launcher in ((), ("-m", "mlflashpoint.run")):
        command = [sys.executable, *launcher, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
        with subprocess.Popen(
            command, env=launcher_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.1)
            process.send_signal(sent)
            codes.append(process.wait(30))
    assert codes == [codes[0]] * 2
    assert codes[0] == -sent and 128 - codes[0] == shell_code


def test_a_missing_script_is_pythons_own_message(tmp_path: Path) -> None:
    plain, ours = both("gone.py", cwd=tmp_path)
    assert plain[0] == 2 and ours == plain


def test_the_job_has_the_agent_and_so_have_its_children(tmp_path: Path) -> None:
    code = f"import subprocess, sys; print({HOOKED}, flush=True)\n"
    child = f"import sys; print({HOOKED})"
    (tmp_path / "script.py").write_text(code + f"subprocess.run([sys.executable, '-c', {child!r}])\n")
    done = python("-m", "mlflashpoint.run", "script.py", env=launcher_environment(), cwd=tmp_path)
    assert done.stdout.splitlines() == ["True", "True"], done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("script.py",),
        ("-m", "module"),
        ("-m", "package"),
        ("-c",),
        ("folder",),
        ("app.pyz",),
        ("-",),
    ],
    ids=str,
)
def test_every_way_to_start_has_the_agent(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    look = f"import sys\nprint({HOOKED})\n"
    for place in ("script.py", "module.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(look)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", look)
    if arguments[0] == "-c":
        arguments = ("-c", look)
    done = python("-m", "mlflashpoint.run", *arguments, env=launcher_environment(), cwd=tmp_path, stdin=look)
    assert done.stdout.splitlines() == ["True"], done.stderr
    plain = python(*arguments, env=launcher_environment(), cwd=tmp_path, stdin=look)
    assert plain.stdout.splitlines() == ["False"], plain.stderr


def test_a_spawn_pool_with_classes_of_main_works_as_in_plain_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"""
import atexit, multiprocessing, pickle, sys
class InMain:
    pass
def work(item):
    return type(item).__name__, {HOOKED}
def late():
    print("atexit", type(pickle.loads(pickle.dumps(InMain()))).__name__)
if __name__ == "__main__":
    atexit.register(late)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map_async(work, [InMain()] * 2).get(60))
"""
    )
    done = python("-m", "mlflashpoint.run", "script.py", env=launcher_environment(), cwd=tmp_path)
    assert done.stdout.splitlines() == ["[('InMain', True), ('InMain', True)]", "atexit InMain"], done.stderr


def test_a_switch_in_the_environment_wins(tmp_path: Path) -> None:
    code = f"import sys; print({HOOKED})"
    for value, hooked in (("0", "False\n"), ("1", "True\n")):
        env = launcher_environment(MLFLASHPOINT_ENABLED=value)
        assert python("-m", "mlflashpoint.run", "-c", code, env=env, cwd=tmp_path).stdout == hooked


def test_the_path_is_prepended_once_and_no_empty_entry_appears(tmp_path: Path) -> None:
    code = "import os; print(os.environ['PYTHONPATH'])"
    for given, expected in (
        (f"{ROOT}", f"{BOOTSTRAP}:{ROOT}"),
        (f"{ROOT}:{BOOTSTRAP}:/x", f"{BOOTSTRAP}:{ROOT}:/x"),
        (f"{ROOT}:", f"{BOOTSTRAP}:{ROOT}:"),
    ):
        env = {**environment(on=False), "PYTHONPATH": given}
        assert python("-m", "mlflashpoint.run", "-c", code, env=env, cwd=tmp_path).stdout == f"{expected}\n"
    env = environment(on=False)
    assert python("-m", "mlflashpoint.run", "-c", code, env=env, cwd=ROOT).stdout == f"{BOOTSTRAP}\n"


def test_it_prints_the_folder_for_the_path_and_a_usage() -> None:
    done = python("-m", "mlflashpoint.run", "--print-path", env=launcher_environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{BOOTSTRAP}\n", "")
    done = python("-m", "mlflashpoint.run", "--help", env=launcher_environment())
    assert done.returncode == 0 and done.stdout.startswith("usage: python ")


def test_isolated_python_is_told_that_the_agent_can_stay_off(tmp_path: Path) -> None:
    done = python("-E", "-m", "mlflashpoint.run", "-c", "print('job')", env=launcher_environment(), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "job\n")
    assert done.stderr.count("\n") == 1 and "the agent can stay off" in done.stderr


@pytest.mark.parametrize(
    ("options", "extra", "expected"),
    [
        ([], {}, ""),
        (["--tune-memcpy"], {}, "glibc.cpu.x86_non_temporal_threshold=1048576"),
        ([], {"MLFLASHPOINT_TUNE_MEMCPY": "1"}, "glibc.cpu.x86_non_temporal_threshold=1048576"),
        ([], {"MLFLASHPOINT_TUNE_MEMCPY": "perhaps"}, ""),
        (["--tune-memcpy"], {"MLFLASHPOINT_ENABLED": "0"}, ""),
        (
            ["--tune-memcpy"],
            {"GLIBC_TUNABLES": "glibc.malloc.check=0"},
            "glibc.malloc.check=0:glibc.cpu.x86_non_temporal_threshold=1048576",
        ),
        (
            ["--tune-memcpy"],
            {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=7"},
            "glibc.cpu.x86_non_temporal_threshold=7",
        ),
    ],
)
def test_streaming_stores_are_set_only_when_asked_for(options: list[str], extra: dict[str, str], expected: str) -> None:
    code = "import os; print(os.environ.get('GLIBC_TUNABLES', ''))"
    done = python("-m", "mlflashpoint.run", *options, "-c", code, env=launcher_environment(**extra))
    assert done.stdout == f"{expected}\n"


@pytest.mark.multiprocess
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")
def test_torchrun_passes_the_agent_on_to_every_rank(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    rank = workspace.write(
        "rank.py",
        """
import os, sys
import torch.distributed as dist
import fw.core, table
dist.init_process_group("gloo")
fw.core.save(1)
from mlflashpoint.agent.registry import REGISTRY
states = {str(handle.state) for handle in REGISTRY.handles.values()}
sys.stdout.write(f"rank {dist.get_rank()} {len(table.CALLS)} {states}\\n")
dist.destroy_process_group()
""",
    )
    env = workspace.environment()
    del env["MLFLASHPOINT_ENABLED"]
    env["PYTHONPATH"] = os.pathsep.join([str(workspace.folder), str(ROOT)])
    command = (
        "-m",
        "mlflashpoint.run",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(rank),
    )
    done = python(*command, env=env, timeout=180)
    assert sorted(done.stdout.splitlines()) == ["rank 0 1 {'active'}", "rank 1 1 {'active'}"], done.stderr
