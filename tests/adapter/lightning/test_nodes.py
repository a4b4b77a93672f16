"""A Lightning job with DDP under torchrun on two nodes: SIGTERM to the launchers, a node is lost with its memory."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.adapter.lightning import support
from tests.adapter.lightning.support import exact
from tests.replication_nodes.cluster import Cluster
from tests.replication_nodes.conftest import nodes_allowed  # noqa: F401

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

ARGV = ("--steps", "24", "--strategy", "ddp")
DEADLINE_S = 120


class Nodes:
    """The job on its two nodes, start after start."""

    def __init__(self, cluster: Cluster, folder) -> None:
        self.cluster = cluster
        self._folder = folder
        self.results: list[dict] = []

    def start(self, *argv: str):
        """One start under torchrun."""
        environ = support.environ("lightning.pytorch", agent=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return self.cluster.torchrun(
            support.RECIPE,
            *("--dir", self._folder / "recipe", "--out", self._folder),
            *ARGV,
            *argv,
            port=port,
            PYTHONPATH=f"{environ['PYTHONPATH']}:{support.ROOT / 'sitecustomize'}",
            RECIPE_PACKAGE="lightning.pytorch",
            MLFLASHPOINT_ENABLED="1",
            MLFLASHPOINT_SAVE_EVERY_N_STEPS="3",
        )

    def until(self, launch, step: int) -> None:
        """Wait until all nodes know that ``step`` is complete."""
        give_up = time.monotonic() + DEADLINE_S
        while not all(f"step {step} is complete on all ranks" in log.read_text() for log in launch.logs):
            assert time.monotonic() < give_up, f"not in time\n{launch.text()}"
            assert all(process.poll() is None for process in launch.processes), f"ended\n{launch.text()}"
            time.sleep(0.05)

    def read_results(self) -> list[dict]:
        return [json.loads((self._folder / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def story(nodes_allowed, tmp_path_factory):  # noqa: F811
    """Two starts: the first is told to end, then a node is gone; the second trains to the end on its replacement."""
    folder = tmp_path_factory.mktemp("nodes")
    cluster = Cluster(2)
    try:
        nodes = Nodes(cluster, folder)
        first = nodes.start("--stall-rank", "-1", "--stall-at", "20", "--stall-s", "3")
        nodes.until(first, 18)
        first.terminate()
        told = first.wait(DEADLINE_S)
        cluster.kill_node(1)
        first.kill()
        cluster.boot(1)
        second = nodes.start()
        yield {"first": first, "told": told, "second": second, "ended": second.wait(DEADLINE_S), "nodes": nodes}
    finally:
        cluster.close()


def test_at_a_sigterm_to_torchrun_the_ranks_end_by_themselves(story):
    assert all(status not in (None, 0) for status in story["told"]), story["first"].text()
    for log in story["first"].logs:
        text = log.read_text()
        assert "Received SIGTERM: 15" in text, text
        assert "forcefully exiting" not in text, text


def test_a_node_that_is_lost_with_its_memory_is_gone_on_from_on_its_replacement(story, straight_run):
    assert story["ended"] == [0, 0], story["second"].text()
    results = story["nodes"].read_results()
    assert [result["started_at"] for result in results] == [18, 18]
    assert [exact(result) for result in results] == [exact(result) for result in straight_run]


@pytest.fixture(scope="module")
def straight_run(story, tmp_path_factory):
    from tests.warm import Zygote

    environ = support.environ("lightning.pytorch", agent=False)
    folder = tmp_path_factory.mktemp("straight")
    zygote = Zygote(support.PYTHON, support.RECIPE, environ, agent=False, folder=folder)
    try:
        return zygote.run(["--dir", str(folder / "recipe"), *ARGV], ranks=2).results
    finally:
        zygote.close()
