from __future__ import annotations

import pytest

from mlflashpoint.adapter.pytorch import MemoryStore
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig
from tests.adapter.pytorch.script.jobs import Warm
from tests.core.ranks import memory_folder


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    started = Warm(tmp_path_factory.mktemp("warm"))
    yield started
    started.close()


@pytest.fixture
def store():
    """The store of a job of one rank."""
    with memory_folder() as folder:
        config = StoreConfig(job_id="job", base_container=folder / "base", replicas=0)
        opened = MemoryStore(Runtime(config, rank=0, world_size=1, local_rank=0))
        yield opened
        opened.runtime.discard()


@pytest.fixture
def said(job):
    """Scenario -> what each rank reports of it; a scenario that broke fails the test with its traceback."""

    def of(scenario):
        found = [report.get(scenario, {"error": "it was not reached"}) for report in job[1]]
        broken = [result["error"] for result in found if isinstance(result, dict) and "error" in result]
        assert not broken, "\n".join(broken)
        return found

    return of
