"""The sitecustomize that ours stands in front of: it runs, and its errors show as they would without us."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.agent.support import BOOTSTRAP, ROOT, environment, python

SHOW = "import sys; m = sys.modules.get('sitecustomize'); print(getattr(m, '__file__', None), getattr(m, 'MARK', None))"


@pytest.mark.parametrize("on", [True, False])
def test_the_users_sitecustomize_runs_once_and_is_the_module_of_that_name(tmp_path: Path, on: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nMARK = 'theirs'\nsys.stderr.write('ran\\n')\n")
    done = python("-c", SHOW, env=environment(BOOTSTRAP, tmp_path, on=on))
    assert done.stdout == f"{tmp_path}/sitecustomize.py theirs\n"
    assert done.stderr == "ran\n"


def test_it_can_be_a_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize").mkdir()
    (tmp_path / "sitecustomize" / "__init__.py").write_text("from sitecustomize.part import MARK\n")
    (tmp_path / "sitecustomize" / "part.py").write_text("MARK = 'part'\n")
    done = python("-c", SHOW, env=environment(BOOTSTRAP, tmp_path))
    assert (done.stdout.split()[-1], done.stderr) == ("part", "")


def test_without_another_one_no_key_error_shows() -> None:
    done = python("-I", "-c", SHOW, env=environment(on=False))
    plain = done.stdout
    done = python("-c", SHOW, env=environment(BOOTSTRAP))
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"{BOOTSTRAP}/sitecustomize.py None\n" if plain == "None None\n" else plain
    assert done.stdout == expected


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('theirs')",
        "import a_module_that_is_not_there",
        "raise ImportError('by hand', name='sitecustomize')",
        "raise SystemExit(5)",
        "raise SystemExit('with a message')",
        "def broken(:",
        "import sys; sys.exit(3)",
        "raise KeyboardInterrupt",
        "import sys; del sys.modules['sitecustomize']",
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_its_errors_show_exactly_as_in_plain_python(tmp_path: Path, source: str, on: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text(source)
    plain = python("-c", "print('job')", env=environment(tmp_path, on=False))
    ours = python("-c", "print('job')", env=environment(BOOTSTRAP, tmp_path, on=on))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    # a traceback of an interpreter that dies has our frame in it; what it says is the same
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    if "Traceback" not in plain.stderr:
        assert ours.stderr == plain.stderr


def test_what_it_does_to_the_path_lasts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.path.append('/its/folder')\n")
    done = python("-c", "import sys; print(sys.path.count('/its/folder'))", env=environment(BOOTSTRAP, tmp_path))
    assert done.stdout == "1\n"


def test_two_copies_of_ours_do_not_call_each_other_without_end(tmp_path: Path) -> None:
    shutil.copytree(BOOTSTRAP, tmp_path / "copy" / "sitecustomize")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "sitecustomize.py").write_text("MARK = 'theirs'\n")
    env = environment(BOOTSTRAP, tmp_path / "copy" / "sitecustomize", BOOTSTRAP, tmp_path / "user")
    done = python("-c", SHOW, env=env)
    assert (done.stdout, done.stderr) == (f"{tmp_path}/user/sitecustomize.py theirs\n", "")


def test_the_root_of_the_source_tree_on_the_path_is_no_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("MARK = 'theirs'\n")
    done = python("-c", SHOW, env=environment(BOOTSTRAP, ROOT, tmp_path))
    assert (done.stdout, done.stderr) == (f"{tmp_path}/sitecustomize.py theirs\n", "")


def test_a_recursive_sitecustomize_that_imports_itself_gets_itself(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sitecustomize\nMARK = sitecustomize.__file__\n")
    done = python("-c", SHOW, env=environment(BOOTSTRAP, tmp_path))
    assert done.stdout.split() == [f"{tmp_path}/sitecustomize.py"] * 2


def distribution_pythons() -> list[str]:
    found = []
    for name in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(name).exists():
            done = python("-I", "-c", SHOW, env=environment(on=False), executable=name)
            if done.returncode == 0 and "sitecustomize.py" in done.stdout:
                found.append(name)
    return found


@pytest.mark.parametrize(
    "executable", distribution_pythons() or [pytest.param("", marks=pytest.mark.skip("no Python with its own one"))]
)
def test_the_one_that_a_distribution_ships_still_runs(executable: str) -> None:
    plain = python("-c", SHOW, env=environment(on=False), executable=executable)
    ours = python("-c", SHOW, env=environment(BOOTSTRAP), executable=executable)
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


def test_a_usercustomize_runs_as_before(tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("import sys\nsys.stderr.write('user\\n')\n")
    plain = python("-c", "", env=environment(tmp_path, on=False))
    ours = python("-c", "", env=environment(BOOTSTRAP, tmp_path))
    assert ours.stderr == plain.stderr
