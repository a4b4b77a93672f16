"""What an installation carries."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.agent.support import environment
from tests.packaging.conftest import Venv

HOOKED = "import sys; print(any(type(f).__module__ == 'mlflashpoint.agent.finder' for f in sys.meta_path))"
Build = Callable[[str], Path]


def test_a_wheel_has_every_module_and_the_start_up_file_and_no_top_level_sitecustomize(
    build: Build, source: Path
) -> None:
    names = set(zipfile.ZipFile(build("build_wheel")).namelist())
    modules = {str(path.relative_to(source)) for path in (source / "mlflashpoint").rglob("*.py")}
    assert modules <= names, f"a folder without __init__.py? {sorted(modules - names)}"
    assert "mlflashpoint/sitecustomize/sitecustomize.py" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"mlflashpoint"}


def test_a_source_distribution_builds_the_same_wheel(build: Build, tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist")) as archive:
        archive.extractall(tmp_path, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    code = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, timeout=180, stdout=subprocess.DEVNULL)
    (wheel,) = (tree / "out").iterdir()
    assert set(zipfile.ZipFile(wheel).namelist()) == set(zipfile.ZipFile(build("build_wheel")).namelist())


def test_the_core_install_depends_on_torch_wrapt_and_a_digest_library_only(build: Build) -> None:
    wheel = zipfile.ZipFile(build("build_wheel"))
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    required = metadata.get_all("Requires-Dist") or []
    core = {text.split(">")[0].split("=")[0].strip() for text in required if "extra ==" not in text}
    assert core == {"torch", "wrapt", "xxhash"}
    extras = {"bridge", "megatron", "nemo", "lightning", "nemo-rl", "test", "docs"}
    assert extras <= set(metadata.get_all("Provides-Extra") or [])
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_command_and_the_launcher_work_from_an_installation(installed: Venv) -> None:
    done = installed.run("mlflashpoint", "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "mlflashpoint")
    assert installed.run("mlflashpoint", "doctor").returncode == 0
    assert installed.run("python", "-m", "mlflashpoint.run", "-c", HOOKED).stdout == "True\n"
    folder = installed.run("python", "-m", "mlflashpoint.run", "--print-path").stdout.strip()
    assert (Path(folder) / "sitecustomize.py").is_file()
    assert installed.run("python", "-c", HOOKED, env=environment(folder)).stdout == "True\n"


def test_an_environment_without_mlflashpoint_gets_the_agent_through_the_path(installed: Venv, tmp_path: Path) -> None:
    # NeMo RL's workers run in environments of their own and inherit the driver's path
    folder = installed.run("python", "-m", "mlflashpoint.run", "--print-path").stdout.strip()
    other = Venv(tmp_path / "other")
    code = HOOKED + "; import mlflashpoint.settings as s; print(s.__file__)"
    done = other.run("python", "-c", code, env=environment(folder))
    hooked, file = done.stdout.splitlines()
    assert hooked == "True" and Path(file).is_file() and not file.startswith(str(other.folder))


def test_after_pip_uninstall_with_everything_still_set_python_starts_clean(installed: Venv) -> None:
    folder = installed.run("python", "-m", "mlflashpoint.run", "--print-path").stdout.strip()
    assert installed.run("mlflashpoint", "install").returncode == 0
    env = environment(folder)
    assert installed.run("python", "-c", HOOKED, env=env).stdout == "True\n"
    installed.pip("uninstall", "-y", "mlflashpoint")
    editable = not folder.startswith(str(installed.folder))
    # the source tree of an editable installation is still there; what is gone is the folder on the path
    done = installed.run("python", "-c", HOOKED, env=environment() if editable else env)
    assert (done.returncode, done.stderr) == (0, "")
    if not editable:
        assert done.stdout == "False\n"
