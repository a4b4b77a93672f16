"""The start-up file in real interpreters: what it costs, whom it runs next, and that it harms nobody."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlflashpoint.agent import bootstrap
from tests.agent.support import BOOTSTRAP, ROOT, environment, python

MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"
HOOKED = "import sys; print(any(type(f).__module__ == 'mlflashpoint.agent.finder' for f in sys.meta_path))"


def modules(env: dict[str, str]) -> set[str]:
    done = python("-c", MODULES, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return set(json.loads(done.stdout))


def other_pythons() -> list[str]:
    names = [f"python{version}" for version in ("2.7", "3.6", "3.7", "3.8", "3.9", "3.14", "3.15")]
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    paths = [shutil.which(name) for name in names]
    paths += [str(path) for name in names for path in root.glob(f"*/bin/{name}")]
    return [path for path in paths if path and "/shims/" not in path]


def test_off_it_imports_nothing_that_plain_python_does_not() -> None:
    plain = modules(environment(on=False))
    assert modules(environment(BOOTSTRAP, on=False)) - plain <= {"sitecustomize"}
    assert modules(environment(BOOTSTRAP, on="0")) - plain <= {"sitecustomize"}


def test_on_it_imports_its_own_small_modules_and_no_other() -> None:
    added = modules(environment(BOOTSTRAP)) - modules(environment(on=False))
    own = ("", ".agent", ".agent.start", ".agent.finder", ".agent.frameworks")
    assert added - {"sitecustomize", "__future__"} == {f"mlflashpoint{name}" for name in own}


@pytest.mark.parametrize("switch", ["1", "true", "YES", " on "])
def test_each_spelling_of_on_installs_the_hook(switch: str) -> None:
    assert python("-c", HOOKED, env=environment(BOOTSTRAP, on=switch)).stdout == "True\n"


@pytest.mark.parametrize("switch", ["0", "false", "No", "off", ""])
def test_each_spelling_of_off_leaves_it_out(switch: str) -> None:
    assert python("-c", HOOKED, env=environment(BOOTSTRAP, on=switch)).stdout == "False\n"


def test_its_syntax_is_that_of_old_pythons() -> None:
    tree = ast.parse((BOOTSTRAP / "sitecustomize.py").read_text(), feature_version=(3, 4))
    modern = (ast.JoinedStr, ast.AnnAssign, ast.AsyncFunctionDef, ast.Await, ast.NamedExpr, ast.Nonlocal, ast.YieldFrom)
    assert not [node for node in ast.walk(tree) if isinstance(node, modern)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(node.returns is None and not node.args.kwonlyargs for node in functions)
    assert all(argument.annotation is None for node in functions for argument in node.args.args)


@pytest.mark.parametrize("executable", other_pythons() or [pytest.param("", marks=pytest.mark.skip("no other Python"))])
def test_a_python_of_another_version_is_silent_and_runs_its_own_sitecustomize(tmp_path: Path, executable: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mine = 'mine'\n")
    code = (
        "import sys; sys.stdout.write('%s %s %s' % ('mlflashpoint' in sys.modules, sys.mine, sitecustomize.__name__))"
    )
    env = environment(BOOTSTRAP, tmp_path, PYTHONDONTWRITEBYTECODE="1")
    done = python("-c", f"import sitecustomize; {code}", env=env, executable=executable)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False mine sitecustomize", "")
    bare = python("-c", "import sys; sys.stdout.write('bare')", env=environment(BOOTSTRAP), executable=executable)
    assert (bare.returncode, bare.stdout, bare.stderr) == (0, "bare", "")


def test_the_supported_versions_are_the_same_in_both_places() -> None:
    scope: dict[str, object] = {"__name__": "read", "__file__": str(BOOTSTRAP / "sitecustomize.py")}
    saved = os.environ.pop("MLFLASHPOINT_ENABLED", None)
    try:
        exec((BOOTSTRAP / "sitecustomize.py").read_text(), scope)
    finally:
        if saved is not None:
            os.environ["MLFLASHPOINT_ENABLED"] = saved
    assert (scope["SUPPORTED"], scope["OFF"]) == (bootstrap.SUPPORTED, bootstrap.OFF)


@pytest.mark.parametrize(
    "start",
    [
        "raise SystemExit(9)",
        "raise ValueError('broken')",
        "this is no Python",
        "import a_module_that_is_not_there",
        "def start():\n    raise SystemExit",
        "class Odd(BaseException): pass\nraise Odd",
        None,
    ],
)
def test_a_broken_agent_leaves_python_as_it_was(tmp_path: Path, start: str | None) -> None:
    shutil.copytree(BOOTSTRAP, tmp_path / "sitecustomize")
    shutil.copytree(ROOT / "mlflashpoint", tmp_path / "mlflashpoint")
    broken = tmp_path / "mlflashpoint" / "agent" / "start.py"
    broken.unlink() if start is None else broken.write_text(start)
    done = python("-c", "print('ok')", env=environment(tmp_path / "sitecustomize"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_a_broken_agent_shows_its_traceback_on_request(tmp_path: Path) -> None:
    shutil.copytree(BOOTSTRAP, tmp_path / "sitecustomize")
    shutil.copytree(ROOT / "mlflashpoint", tmp_path / "mlflashpoint")
    (tmp_path / "mlflashpoint" / "agent" / "start.py").write_text("raise ValueError('broken')")
    done = python("-c", "print('ok')", env=environment(tmp_path / "sitecustomize", MLFLASHPOINT_LOG_LEVEL="debug"))
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "ValueError: broken" in done.stderr


def test_the_package_beside_the_start_up_file_wins_over_another_one_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "mlflashpoint").mkdir()
    (tmp_path / "mlflashpoint" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    code = "import mlflashpoint.agent.finder as f; print(f.__file__)"
    done = python("-c", code, env=environment(BOOTSTRAP, tmp_path))
    assert done.stdout.strip() == str(ROOT / "mlflashpoint" / "agent" / "finder.py"), done.stderr


@pytest.mark.parametrize(
    ("flags", "hooked"),
    [(["-I"], False), (["-E"], False), (["-S"], False), (["-s"], True), (["-B"], True), (["-O"], True)]
    + ([(["-P"], True)] if sys.version_info >= (3, 11) else []),
)
def test_which_interpreter_options_keep_the_agent_out(flags: list[str], hooked: bool) -> None:
    done = python(*flags, "-c", HOOKED, env=environment(BOOTSTRAP))
    assert (done.stdout, done.stderr) == (f"{hooked}\n", "")


def test_nothing_is_written_to_stdout_or_stderr() -> None:
    # a script that parses a child's output must find nothing else in it
    done = python("-c", "", env=environment(BOOTSTRAP))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_start_up_code_that_spawns_a_python_does_not_start_the_agent_without_end(tmp_path: Path) -> None:
    # an editable install's finder that builds something when a package comes in, as build back ends have them
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, subprocess, sys
class Builds:
    def find_spec(self, name, path=None, target=None):
        if name == "mlflashpoint.agent.start":
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("built\\n")
            if len(open({str(tmp_path / "log")!r}).readlines()) < 5:
                subprocess.run([sys.executable, "-c", "pass"], check=True)
sys.meta_path.insert(0, Builds())
"""
    )
    # the finder has to be there before ours starts: this order of the two files on the path
    code = f"import sys; sys.path.insert(0, {str(BOOTSTRAP)!r}); sys.modules.pop('sitecustomize'); import sitecustomize"
    (tmp_path / "sitecustomize.py").open("a").write(code)
    done = python("-c", HOOKED, env=environment(tmp_path))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert (tmp_path / "log").read_text() == "built\n"


def test_children_find_the_folder_on_their_path_and_are_hooked(tmp_path: Path) -> None:
    code = f"""
import multiprocessing, os, subprocess, sys
def look(queue):
    queue.put(any(type(f).__module__ == 'mlflashpoint.agent.finder' for f in sys.meta_path))
if __name__ == "__main__":
    assert {str(BOOTSTRAP)!r} in sys.path and os.environ["PYTHONPATH"] == {str(BOOTSTRAP)!r}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=look, args=(queue,))
        child.start()
        print(method, queue.get(timeout=30))
        child.join(30)
    print("subprocess", subprocess.check_output([sys.executable, "-c", {HOOKED!r}], text=True).strip())
"""
    (tmp_path / "children.py").write_text(code)
    done = python(str(tmp_path / "children.py"), env=environment(BOOTSTRAP))
    assert done.stdout.splitlines() == ["fork True", "spawn True", "forkserver True", "subprocess True"], done.stderr


def test_the_folder_can_be_reached_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(BOOTSTRAP)
    done = python("-c", HOOKED, env=environment(tmp_path / "link", BOOTSTRAP))
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_with_standard_streams_closed_python_still_starts() -> None:
    env = environment(BOOTSTRAP, MLFLASHPOINT_LOG_LEVEL="DEBUG")
    command = f'exec "{sys.executable}" -c "import os; os._exit(7)" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], env=env, check=False, timeout=60).returncode == 7
