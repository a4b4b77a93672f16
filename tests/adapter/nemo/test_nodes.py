"""NeMo 2.0 on two nodes under the agent: a node loses its memory; context files are beside the versions on both."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.adapter.lightning.support import steps
from tests.adapter.nemo.test_agent import exact

pytestmark = pytest.mark.multiprocess

ARGV = ("--nodes", "--distributed-optimizer")


def contexts(job) -> dict[str, list[str]]:
    """Steps of the versions that have context files, by node."""
    found: dict[str, list[str]] = {}
    for node in ("node-0", "node-1"):
        files = sorted((job.base / node).glob("step-*_ckpt/context/io.json"))
        assert all(json.loads(file.read_text()) and b"mlflashpoint" not in file.read_bytes() for file in files)
        found[node] = [file.parent.parent.name for file in files]
    return found


def test_context_files_are_on_every_node_also_of_a_version_that_came_from_another_node(job, straight):
    killed = job.run(*ARGV, "--kill-at", "5", "--settle-s", "1", ranks=2)
    assert killed.statuses[0] == -9 and [steps(log) for log in killed.logs] == [[2, 4], [2, 4]], killed.log
    both = ["step-2_ckpt", "step-4_ckpt"]
    assert contexts(job) == {"node-0": both, "node-1": both}
    shutil.rmtree(job.base / "node-1")
    # killed before it has saved anything itself
    again = job.run(*ARGV, "--kill-at", "5", ranks=2)
    assert again.statuses[0] == -9 and all("going on from memory, step 4" in log for log in again.logs), again.log
    assert contexts(job) == {"node-0": both, "node-1": ["step-4_ckpt"]}
    last = job.run(*ARGV, ranks=2)
    assert last.statuses == [0, 0], last.log
    assert exact(last.results) == exact(straight("--distributed-optimizer", ranks=2))
    left = [path for path in job.base.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert left == [], "versions and context files are gone after a good end"
