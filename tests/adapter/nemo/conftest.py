from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adapter.lightning import support
from tests.warm import Zygote

ENV = support.ROOT / ".envs" / "nemo"
RECIPE = Path(__file__).with_name("recipe.py")


def environ(*, agent: bool) -> dict[str, str]:
    support.need(ENV, "tools/envs/nemo.sh")
    found = {name: value for name, value in os.environ.items() if not name.startswith("MLFLASHPOINT_")}
    found.update(PYTHONPATH=str(support.ROOT), OMP_NUM_THREADS="1")
    if agent:
        found.update(MLFLASHPOINT_ENABLED="1", MLFLASHPOINT_JOB_ID="zygote", MLFLASHPOINT_LOG_LEVEL="DEBUG")
    return found


def _zygote(tmp_path_factory, *, agent: bool):
    folder = tmp_path_factory.mktemp(f"nemo-{agent}")
    return Zygote(ENV / "bin" / "python", RECIPE, environ(agent=agent), agent=agent, folder=folder)


@pytest.fixture(scope="session")
def nemo_agent(tmp_path_factory):
    zygote = _zygote(tmp_path_factory, agent=True)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def nemo_plain(tmp_path_factory):
    zygote = _zygote(tmp_path_factory, agent=False)
    yield zygote
    zygote.close()


def _job(zygote, folder: Path):
    base = support.new_base()
    yield support.Job(zygote, folder, base, every=2)
    support.clean(base)


@pytest.fixture
def job(nemo_agent, tmp_path: Path):
    yield from _job(nemo_agent, tmp_path / "recipe")


@pytest.fixture
def plain_job(nemo_plain, tmp_path: Path):
    yield from _job(nemo_plain, tmp_path / "plain")


@pytest.fixture(scope="session")
def straight(nemo_plain, tmp_path_factory):
    """Results of runs without us and without a kill, by their arguments; each is run once."""
    known: dict[tuple, list[dict]] = {}

    def run(*argv: str, ranks: int = 1) -> list[dict]:
        key = (argv, ranks)
        if key not in known:
            outcome = nemo_plain.run(["--dir", str(tmp_path_factory.mktemp("straight")), *argv], ranks=ranks)
            assert outcome.statuses == [0] * ranks, outcome.log
            assert not any(result["ours"] for result in outcome.results)
            known[key] = outcome.results
        return known[key]

    return run
