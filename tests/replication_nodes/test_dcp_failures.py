"""What goes wrong on one rank of two nodes is a named error on all ranks by each kind of save, and costs no version."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

KINDS = ("sync", "thread", "process")


@pytest.fixture(scope="module")
def reports(dcp_job):
    """Of four ranks on two nodes, and of two ranks after node 1 was lost."""
    job = dcp_job(Path(__file__).with_name("dcp_failures.py"), 2)
    saved = job.start("save", (0, 0, 1, 1), kill=1)
    job.replace(1)
    return saved, job.start("load", (0, 1))


def said(reports, scenario, kind=None, start=0):
    found = [report.get(scenario, {"error": "it was not reached"}) for report in reports[start]]
    broken = [result["error"] for result in found if isinstance(result, dict) and "error" in result]
    assert not broken, "\n".join(broken)
    return [result[kind] for result in found] if kind else found


def refused(results, *ranks):
    """Type and text of the error of each of ``ranks``, which all ranks have seen, and soon."""
    assert max(result["seconds"] for result in results) < 30
    (failures,) = {tuple(sorted((int(rank), *error) for rank, error in r["failures"].items())) for r in results}
    assert [rank for rank, _, _ in failures] == list(ranks)
    return [tuple(error) for _, *error in failures]


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_that_is_not_allowed_on_one_rank_is_named_on_all(reports, kind):
    results = said(reports, "a_type_that_is_not_allowed", kind)
    ((name, text),) = refused(results, 3)
    assert name == "StateTypeError"
    assert "'bad.lock' is a _thread.lock" in text and "rank 3, step 2" in text and "register" in text
    assert [result["before"] for result in results] == [[1, 1, [1.0]]] * 4
    assert [result["after"] for result in results] == [[3, 3, [3.0]]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_memory_on_one_node_is_named_on_all_ranks(reports, kind):
    results = said(reports, "a_full_store", kind)
    ((name, text),) = refused(results, 3)
    assert name == "StoreFullError" and "rank 3, step 4" in text
    # A state travels to a checkpoint process through the same memory.
    words = ("there is no room in /dev/shm",) if kind == "process" else ("need", "more bytes, the store has")
    assert all(word in text for word in words)
    assert [result["before"] for result in results] == [[3, 3, [3.0]]] * 4
    assert [result["after"] for result in results] == [[5, 5, [5.0]]] * 4


def test_a_path_that_holds_no_version_on_one_rank_is_named_on_all(reports):
    ((name, text),) = refused(said(reports, "a_path_that_holds_no_version_on_one_rank"), 3)
    assert name == "NoVersionError" and "nowhere" in text


def test_a_corrupted_shard_is_loaded_from_its_replica_and_without_one_the_version_before_is(reports):
    assert said(reports, "a_corrupted_shard") == [[[7, 7, [7.0]], [6, 6, [6.0]]]] * 4


def test_a_version_that_each_rank_saved_for_itself_is_refused_by_another_number_of_ranks(reports):
    failures = refused(said(reports, "another_world_size_without_resharding", start=1), 0, 1)
    for name, text in failures:
        assert name == "TopologyMismatchError" and "4 ranks each for itself" in text and "the job has 2" in text
