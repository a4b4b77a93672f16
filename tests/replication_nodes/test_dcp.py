"""DCP's library form on several nodes: what a wiped node had is loaded from where its replicas lie, bit for bit."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

RANKS = Path(__file__).with_name("dcp_ranks.py")
FORMS = {"short": 3, "long": 5}


@pytest.fixture(scope="module")
def two_nodes(dcp_job):
    """Start of the job -> what its ranks reported; before each one a node lost all that it had."""
    job = dcp_job(RANKS, 2)
    found = {"save": job.start("save", (0, 0, 1, 1), kill=1)}
    job.replace(1)
    found["as many ranks"] = job.start("load", (0, 0, 1, 1))
    # What node 0 had lies on node 1 now, if the start before has replaced the lost replicas.
    job.replace(0)
    found["two ranks"] = job.start("load", (0, 1))
    found["three ranks"] = job.start("load", (0, 0, 1))
    return found


@pytest.fixture(scope="module")
def three_nodes(dcp_job):
    """The same of a job of three ranks, two of which load: no node has more than two of the three shards."""
    job = dcp_job(RANKS, 3)
    found = {"save": job.start("save", (0, 1, 2), kill=1)}
    job.replace(1)
    found["two ranks"] = job.start("load", (0, 2))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", ["as many ranks", "two ranks", "three ranks"])
def test_a_job_of_two_nodes_one_of_which_was_lost_loads_bit_for_bit(two_nodes, form, start):
    check(two_nodes, form, start)


@pytest.mark.parametrize("form", FORMS)
def test_fewer_ranks_fetch_the_shards_from_whichever_of_three_nodes_has_them(three_nodes, form):
    check(three_nodes, form, "two ranks")


def check(reports, form, start):
    assert {report["saved"][form] for report in reports["save"]} == {FORMS[form]}
    for report in reports[start]:
        found = report[form]
        assert "error" not in found, found["error"]
        assert found["step"] == FORMS[form]
        assert found["differing"] == [] and found["changed"] > 20
