"""With a checkpoint process per rank, the training processes of three nodes load what lies on none of them whole."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def reports(dcp_job):
    """Of three ranks, each on a node, and of the start after node 1 was lost."""
    job = dcp_job(Path(__file__).with_name("dcp_process.py"), 3)
    saved = job.start("save", (0, 1, 2), kill=1)
    job.replace(1)
    return saved, job.start("load", (0, 1, 2))


def told(reports, scenario, start=0):
    """What all ranks have seen, which is the same."""
    first, *others = [report.get(scenario, "it was not reached") for report in reports[start]]
    assert others == [first] * 2
    return first


def test_the_newest_version_is_found_and_loaded_from_the_nodes_that_have_its_shards(reports):
    assert told(reports, "saved") == [2, []]


def test_while_the_next_version_is_saved_the_one_before_it_is_loaded_whole_or_already_that(reports):
    step, differing = told(reports, "while_the_next_is_saved")
    assert step in (2, 3) and differing == []
    assert told(reports, "after_that") == [3, []]


def test_when_the_checkpoint_processes_are_dead_what_they_saved_is_loaded(reports):
    assert told(reports, "beside_dead_checkpoint_processes") == [3, []]


def test_after_the_loss_of_a_node_the_next_start_loads_it(reports):
    assert told(reports, "found", start=1) == [3, []]
