from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapter.lightning import support
from tests.warm import Zygote


@pytest.fixture(scope="session", params=list(support.PACKAGES))
def package(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def agent_zygote(package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    zygote = Zygote(support.PYTHON, support.RECIPE, support.environ(package, agent=True), agent=True, folder=folder)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def plain_zygote(package, tmp_path_factory):
    """Without the agent; the library form is imported by the recipe."""
    folder = tmp_path_factory.mktemp("plain")
    zygote = Zygote(support.PYTHON, support.RECIPE, support.environ(package, agent=False), agent=False, folder=folder)
    yield zygote
    zygote.close()


@pytest.fixture
def job(agent_zygote, tmp_path: Path):
    base = support.new_base()
    yield support.Job(agent_zygote, tmp_path / "recipe", base)
    support.clean(base)


@pytest.fixture
def other_job(agent_zygote, tmp_path: Path):
    base = support.new_base()
    yield support.Job(agent_zygote, tmp_path / "other", base)
    support.clean(base)


@pytest.fixture
def plain_job(plain_zygote, tmp_path: Path):
    base = support.new_base()
    yield support.Job(plain_zygote, tmp_path / "plain", base)
    support.clean(base)


@pytest.fixture(scope="session")
def straight(plain_zygote, tmp_path_factory):
    """Results of runs without us and without a kill, by their arguments; each is run once."""
    known: dict[tuple, dict] = {}

    def run(*argv: str, ranks: int = 1) -> dict:
        key = (argv, ranks)
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            outcome = plain_zygote.run(["--dir", str(folder), *argv], ranks=ranks)
            assert outcome.statuses == [0] * ranks, outcome.log
            assert not any(result["ours"] for result in outcome.results)
            known[key] = outcome.results
        return known[key]

    return run
