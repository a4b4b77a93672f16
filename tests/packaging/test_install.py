"""``mlflashpoint install`` and ``uninstall`` in real virtual environments."""

from __future__ import annotations

import os
from pathlib import Path

from tests.agent.support import BOOTSTRAP, ROOT, environment, python
from tests.packaging.conftest import Venv

HOOKED = "import sys; print([type(f).__module__ for f in sys.meta_path].count('mlflashpoint.agent.finder'))"


def test_install_starts_the_agent_without_a_path_and_uninstall_undoes_it(installed: Venv) -> None:
    before = installed.listing()
    on = environment()
    assert installed.run("python", "-c", HOOKED, env=on).stdout == "0\n"
    first = installed.run("mlflashpoint", "install")
    assert first.returncode == 0 and first.stdout.startswith("installed: ")
    assert len(installed.listing()) == len(before) + 1
    for flags in ((), ("-I",), ("-E",), ("-s",)):
        assert installed.run("python", *flags, "-c", HOOKED, env=on).stdout == "1\n"
    assert installed.run("python", "-S", "-c", HOOKED, env=on).stdout == "0\n"
    after = installed.listing()
    again = installed.run("mlflashpoint", "install")
    assert again.returncode == 0 and again.stdout.startswith("already installed: ")
    assert installed.listing() == after
    gone = installed.run("mlflashpoint", "uninstall")
    assert gone.returncode == 0 and gone.stdout.startswith("removed: ")
    assert installed.listing() == before
    assert installed.run("mlflashpoint", "uninstall").stdout.startswith("was not installed: ")
    done = installed.run("python", "-c", HOOKED, env=on)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_switched_off_it_loads_nothing(installed: Venv) -> None:
    code = "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] == 'mlflashpoint'))"
    installed.run("mlflashpoint", "install")
    for env in (environment(on=False), environment(on="0"), environment(on="off")):
        done = installed.run("python", "-c", code, env=env)
        assert (done.stdout, done.stderr) == ("[]\n", "")


def test_an_environments_own_sitecustomize_stays_whole(installed: Venv) -> None:
    own = installed.packages / "sitecustomize.py"
    own.write_text("import sys\nMARK = 'own'\nsys.stderr.write('ran\\n')\n")
    installed.run("mlflashpoint", "install")
    code = HOOKED + "; print(sys.modules['sitecustomize'].__file__)"
    done = installed.run("python", "-c", code, env=environment())
    assert (done.stdout, done.stderr) == (f"1\n{own}\n", "ran\n")
    own.write_text("raise ValueError('own')\n")
    ours = installed.run("python", "-c", "print('job')", env=environment())
    installed.run("mlflashpoint", "uninstall")
    plain = installed.run("python", "-c", "print('job')", env=environment())
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert "ValueError: own" in ours.stderr


def test_the_folder_on_the_path_beside_it_starts_the_agent_once(installed: Venv) -> None:
    installed.run("mlflashpoint", "install")
    folder = installed.run("python", "-m", "mlflashpoint.run", "--print-path").stdout.strip()
    assert installed.run("python", "-c", HOOKED, env=environment(folder)).stdout == "1\n"


def test_the_doctor_names_the_installed_file(installed: Venv) -> None:
    installed.run("mlflashpoint", "install")
    done = installed.run("mlflashpoint", "doctor", env=environment(MLFLASHPOINT_JOB_ID="j"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"agent       on: {installed.packages}/mlflashpoint-agent.pth starts it\n")


def test_an_environment_that_can_not_be_written_is_refused_politely(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv")
    venv.packages.rmdir()
    # nobody, the superuser included, can make a file there
    venv.packages.symlink_to("/sys/kernel")
    for command in ("install", "uninstall"):
        done = python("-m", "mlflashpoint.cli", command, env=environment(ROOT, on=False), executable=venv.python)
        if command == "uninstall":
            assert (done.returncode, done.stderr) == (0, "")
            continue
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        assert "can't write this environment's package folder" in done.stderr and str(BOOTSTRAP) in done.stderr
    assert not [name for name in os.listdir("/sys/kernel") if "mlflashpoint" in name]
