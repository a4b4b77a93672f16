from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.support import ROOT, environment


class Venv:
    """A virtual environment without any package, not even pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", str(self.python)]
        env = environment(on=False)
        subprocess.run([*command, *arguments], check=True, timeout=120, env=env, stdout=subprocess.DEVNULL)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``bin/<first argument>`` of the environment with the rest."""
        command = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        return subprocess.run(
            command,
            env=environment(on=False) if env is None else env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.folder,
        )

    def listing(self) -> list[str]:
        return sorted(str(path) for path in self.folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that a build leaves nothing in it."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("mlflashpoint", "sitecustomize"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="session")
def build(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs a build hook (``build_wheel``, ``build_editable``, ``build_sdist``); returns the path of what it made."""
    made: dict[str, Path] = {}

    def run(hook: str) -> Path:
        if hook not in made:
            target = tmp_path_factory.mktemp(hook)
            code = f"from setuptools import build_meta; print(build_meta.{hook}({str(target)!r}))"
            env = {**environment(on=False), "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=source,
                env=env,
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            made[hook] = target / done.stdout.split(os.linesep)[-2]
        return made[hook]

    return run


@pytest.fixture(params=["build_wheel", "build_editable"])
def installed(request: pytest.FixtureRequest, build: Callable[[str], Path], tmp_path: Path) -> Venv:
    """An environment with mlflashpoint in it and nothing else: its dependencies are not needed to start or to look."""
    venv = Venv(tmp_path / "venv")
    venv.pip("install", "--no-deps", "--no-index", str(build(request.param)))
    return venv
