"""Makes the nodes that a test asks for, and removes them however it ends."""

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.replication_nodes.cluster import Cluster, why_not
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
    made = []

    def make(count, **options):
        made.append(Cluster(count, **options))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    """A warm process for ranks that use DCP; replicas are as they are by default."""
    environ = {**os.environ, **launch.environment()}
    del environ["MLFLASHPOINT_REPLICAS"]
    started = Zygote(Path(sys.executable), IMPORTS, environ, agent=False, folder=tmp_path_factory.mktemp("warm"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def dcp_job(lasting_cluster, zygote, tmp_path_factory):
    """Make a job of a script's ranks on so many nodes."""
    return lambda script, count: Job(lasting_cluster(count), zygote, script, tmp_path_factory.mktemp("job"))


class Job:
    """A job whose ranks a warm process forks; they find the durable folder in their arguments."""

    def __init__(self, cluster, zygote, script, folder):
        self.cluster, self.zygote, self.script, self.folder = cluster, zygote, script, folder
        self.starts = 0

    def start(self, what, places, *, kill=None):
        """Run it to its end, or until all ranks wait for the end of node ``kill``; returns their reports."""
        self.starts += 1
        out = self.folder / f"{self.starts}-{what}"
        out.mkdir()
        ended = threading.Event()
        if kill is not None:
            threading.Thread(target=self._kill, args=(kill, out, len(places), ended)).start()
        durable = self.folder / "durable"
        outcome = self.cluster.fork(self.zygote, self.script, what, durable, places=places, REPORTS=str(out))
        ended.set()
        assert not outcome.late, f"ranks hang\n{outcome.log}"
        assert kill is not None or set(outcome.statuses) == {0}, outcome.log
        return launch.reports_in(out, self.script, len(places), outcome.log)

    def _kill(self, node, out, ranks, ended):
        while len(list(out.glob("waiting-*"))) < ranks:
            if ended.wait(0.05):
                return
        self.cluster.kill_node(node)

    def replace(self, node):
        """The node loses all that it has."""
        if self.cluster.nodes[node] is not None:
            self.cluster.kill_node(node)
        self.cluster.boot(node)
