"""Makes the nodes that a test asks for, and removes them however it ends."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.adapter.pytorch.script import jobs
from tests.replication_nodes.cluster import Cluster, why_not
from tests.replication_nodes.forked import Job
from tests.warm import Zygote

IMPORTS = Path(__file__).parents[1] / "adapter" / "pytorch" / "script" / "imports.py"


@pytest.fixture(scope="session")
def nodes_allowed():
    reason = why_not()
    if reason:
        assert not os.environ.get("REQUIRE_NETNS"), reason
        pytest.skip(f"NOT RUN: tests on real nodes need network namespaces, and {reason}")


@pytest.fixture
def cluster(nodes_allowed):
    with clusters() as make:
        yield make


@pytest.fixture(scope="module")
def lasting_cluster(nodes_allowed):
    """The same for a job that all tests of a module ask about."""
    with clusters() as make:
        yield make


@contextlib.contextmanager
def clusters():
    with contextlib.ExitStack() as made:

        def make(count, **options):
            cluster = Cluster(count, **options)
            made.callback(cluster.close)
            return cluster

        yield make


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    """A warm process for ranks that use DCP; replicas are as they are by default."""
    environ = {**os.environ, **launch.environment()}
    del environ["MLFLASHPOINT_REPLICAS"]
    started = Zygote(Path(sys.executable), IMPORTS, environ, agent=False, folder=tmp_path_factory.mktemp("warm"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def scripts(tmp_path_factory):
    """The warm processes of scripts in plain PyTorch, with the agent and without it."""
    started = jobs.Warm(tmp_path_factory.mktemp("scripts"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def dcp_job(lasting_cluster, zygote, tmp_path_factory):
    """Make a job of a script's ranks on so many nodes."""
    return lambda script, count: Job(lasting_cluster(count), zygote, script, tmp_path_factory.mktemp("job"))
