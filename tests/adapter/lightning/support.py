"""What the tests of this folder share: environments, warm processes, and reading what a run has told."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.warm import Outcome, Zygote

ROOT = Path(__file__).parents[3]
RECIPE = Path(__file__).with_name("recipe.py")
OVERLAYS = ROOT / ".envs" / "lightning"
PYTHON = ROOT / ".venv" / "bin" / "python"
#: package -> overlay
PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
#: the overlay of each package's releases in between
BETWEEN = {package: f"{overlay}-2.5" for package, overlay in PACKAGES.items()}
#: one save in this many steps
EVERY = 3

_SAVE = re.compile(r"mlflashpoint save (\{.*?\})$", re.MULTILINE)
_OBSERVE = re.compile(r"mlflashpoint observe (\{.*?\})$", re.MULTILINE)


def need(environment: Path, builder: str) -> None:
    """Skip the test if its environment was not built; fail it where all are to be there."""
    if not (environment / ".stamp").is_file():
        leave = pytest.fail if os.environ.get("REQUIRE_FRAMEWORKS") else pytest.skip
        leave(f"{environment} is missing: {builder} builds it")


def environ(package: str, *, agent: bool, overlay: str = "", also: str = "") -> dict[str, str]:
    """Environment of a warm process; ``overlay`` is not the package's usual one, ``also`` a second one on the path."""
    chosen = [overlay or PACKAGES[package], *([also] if also else [])]
    for name in chosen:
        need(OVERLAYS / name, "tools/envs/lightning.sh")
    paths = [*(OVERLAYS / name for name in chosen), ROOT]
    found = {name: value for name, value in os.environ.items() if not name.startswith("MLFLASHPOINT_")}
    found.update(PYTHONPATH=":".join(map(str, paths)), OMP_NUM_THREADS="1", RECIPE_PACKAGE=package)
    if agent:
        found.update(MLFLASHPOINT_ENABLED="1", MLFLASHPOINT_JOB_ID="zygote", MLFLASHPOINT_LOG_LEVEL="DEBUG")
    return found


@dataclass
class Job:
    """A job of the recipe: its folder and its memory container stay while it is killed and started again."""

    zygote: Zygote
    folder: Path
    base: Path
    every: int = EVERY

    def run(
        self, *argv: str, ranks: int = 1, deadline_s: float = 120, grace_s: float = 1, **settings: object
    ) -> Outcome:
        """One start; ``settings`` are ours in lower case, None unsets one."""
        chosen = {"save_every_n_steps": self.every, "job_id": "job", "base_container": self.base, **settings}
        environ = {f"MLFLASHPOINT_{name.upper()}": str(value) for name, value in chosen.items() if value is not None}
        return self.zygote.run(
            ["--dir", str(self.folder), *argv], ranks=ranks, environ=environ, deadline_s=deadline_s, grace_s=grace_s
        )

    def versions(self, group: str = "lightning") -> list[Path]:
        return sorted(self.base.glob(f"{group}/seat-*/*.commit"))


def new_base() -> Path:
    return Path("/dev/shm") / f"mlf-test-{os.getpid()}-{secrets.token_hex(4)}"


def clean(base: Path) -> None:
    shutil.rmtree(base, ignore_errors=True)


def saves(log: str) -> list[dict]:
    return [json.loads(found) for found in _SAVE.findall(log)]


def steps(log: str) -> list[int]:
    """Steps of the memory saves that went well."""
    return [save["step"] for save in saves(log) if save["ok"] and not save["skipped"]]


def observed(log: str) -> list[dict]:
    return [json.loads(found) for found in _OBSERVE.findall(log)]


#: what has to be equal, to the bit, between a run that was killed and one that was not
EXACT = ("step", "epoch", "weights", "buffers", "optimizer", "lr", "count")


def exact(result: dict) -> dict:
    return {name: result[name] for name in EXACT}
