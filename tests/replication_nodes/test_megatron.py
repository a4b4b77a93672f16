"""Megatron-Core's ``dist_checkpointing`` on two nodes: a real GPT whose common state survives the loss of any node."""

import os
from pathlib import Path

import pytest

from tests.adapter.megatron.conftest import RELEASES
from tests.adapter.pytorch import launch
from tests.replication_nodes.forked import Job
from tests.warm import Zygote

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

RANKS = Path(__file__).with_name("megatron_ranks.py")
IMPORTS = Path(__file__).parents[1] / "adapter" / "megatron" / "imports.py"
STEPS = {"dp_reshardable": 3, "fully_reshardable": 4}


@pytest.fixture(scope="module")
def reports(lasting_cluster, tmp_path_factory):
    """Of the job of four ranks, of its next start, and of two ranks; before each of these a node lost all it had."""
    python, packages = RELEASES["0.19.2"]
    if not python.exists() or not packages.is_dir():
        assert not os.environ.get("REQUIRE_FRAMEWORKS"), f"{packages} is missing"
        pytest.skip("no environment with megatron-core 0.19.2: run tools/envs/bridge.sh")
    environ = {**os.environ, **launch.environment([packages])}
    del environ["MLFLASHPOINT_REPLICAS"]
    zygote = Zygote(python, IMPORTS, environ, agent=False, folder=tmp_path_factory.mktemp("warm"))
    try:
        job = Job(lasting_cluster(2), zygote, RANKS, tmp_path_factory.mktemp("job"))
        found = [job.start("save", (0, 0, 1, 1), kill=0)]
        job.replace(0)
        found.append(job.start("load", (0, 0, 1, 1)))
        job.replace(1)
        return [*found, job.start("load", (0, 1))]
    finally:
        zygote.close()


def said(reports, start, scenario):
    found = [report.get(scenario, {"error": "it was not reached"}) for report in reports[start]]
    broken = [result["error"] for result in found if "error" in result]
    assert not broken, "\n".join(broken)
    return found


@pytest.mark.parametrize("kind", STEPS)
def test_the_common_state_is_on_every_node(reports, kind):
    assert [result[kind] for result in said(reports, 0, "saved")] == [["common.pt", "metadata.json"]] * 4


@pytest.mark.parametrize(("start", "kind"), [(1, "dp_reshardable"), (1, "fully_reshardable"), (2, "fully_reshardable")])
def test_without_the_node_that_was_lost_model_optimizer_and_common_state_load_bit_for_bit(reports, start, kind):
    for result in said(reports, start, kind):
        assert result["differing"] == [] and result["compared"] > 50
        assert result["goes_on_equal"]
        assert result["common"] == [STEPS[kind], {"lr": 0.1, "nothing": None}, [1, None, "x"]]
        assert result["files"] == ["common.pt", "metadata.json"]
