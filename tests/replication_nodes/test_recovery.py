"""A recovery on nodes whose links are slow or stalled, and one of which dies while another fetches from it."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

DEADLINE_S = 6
PLACES = (0, 1, 2)


@pytest.fixture(scope="module")
def reports(dcp_job):
    """Of three ranks, each on a node: of a job whose node 2 was killed at last, and of its start on a new one."""
    job = dcp_job(Path(__file__).with_name("recovery_ranks.py"), 3)
    told = job.start("save", PLACES, kill=2, waiting=1, grace_s=30)
    job.replace(2)
    return told, job.start("again", PLACES)


def said(reports, scenario, ranks=PLACES, start=0, within_s=DEADLINE_S):
    found = [reports[start][rank].get(scenario, {"error": "it was not reached", "step": None}) for rank in ranks]
    assert not [result["error"] for result in found if "Traceback" in result["error"]], found
    assert max(result["took"] for result in found) < within_s, found
    return found


def decided(found):
    """Step, whether its bytes are the same, and the error, alike on all ranks."""
    ((step, same, error),) = {(result["step"], result["same"], result["error"]) for result in found}
    return step, same, error


def test_over_slow_links_a_lost_shard_comes_from_both_nodes_that_have_it(reports):
    assert [report["saved"] for report in reports[0]] == [2, 2, 2]
    found = said(reports, "slow_links")
    assert decided(found) == (2, True, "")
    assert found[1]["took"] > 1


def test_when_one_source_stalls_the_shard_comes_from_the_other(reports):
    assert decided(said(reports, "one_stalled_link")) == (2, True, "")


def test_when_all_sources_stall_all_ranks_fall_back_to_an_older_version(reports):
    assert decided(said(reports, "stalled_links_and_the_version_before_at_hand")) == (1, True, "")


def test_when_all_sources_stall_and_no_version_is_left_all_ranks_find_nothing_in_memory(reports):
    assert decided(said(reports, "stalled_links_and_nothing_at_hand")) == (-1, False, "")


def test_when_a_source_node_is_killed_while_another_fetches_from_it_the_others_decide_alike_and_in_time(
    reports,
):
    # To join, and to decide, take a deadline each.
    step, same, error = decided(said(reports, "a_killed_source", ranks=(0, 1), within_s=2 * DEADLINE_S))
    # It depends on whether the node had given its vote by then.
    assert (step, same, error) == (2, True, "") or "DeadlineExceededError: rank 2 did not answer" in error


def test_with_a_new_node_in_its_place_the_job_then_recovers_what_two_nodes_have_lost(reports):
    assert decided(said(reports, "again", start=1)) == (2, True, "")
