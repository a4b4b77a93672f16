"""A rank whose store another process has sees what a start would see, on all nodes, and changes nothing."""

import pytest

from tests.core import node_bodies
from tests.core.ranks import Life, memory_folder
from tests.core.test_nodes import nodes_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results():
    """What three ranks saw, each on a node of its own, which never has more than two of the three shards."""
    with memory_folder() as folder:
        yield Life(node_bodies.look_on, 3, None, bases=nodes_of(folder / "base", 3), seats=[0, 0, 0]).results()


def told(results, what):
    """What all ranks have seen, which is the same."""
    first, *others = [result[what] for result in results.values()]
    assert others == [first] * len(others)
    return first


def test_where_there_is_no_container_yet_all_ranks_find_nothing(results):
    assert told(results, "nothing") is None
    assert any("there is no memory container here" in line for line in results[1]["logs"])


def test_every_shard_is_read_from_whichever_node_has_it(results):
    assert told(results, "whole") == [2, [200.0, 201.0, 202.0]]


def test_looking_changes_no_file(results):
    assert told(results, "untouched") is True


def test_a_version_that_is_damaged_in_all_its_copies_is_passed_over_by_all_ranks_and_left_as_it_is(results):
    assert told(results, "damaged") == [1, [100.0, 101.0, 102.0]]
    assert told(results, "quarantined") == []


def test_what_was_overwritten_since_it_was_found_is_refused_and_never_read(results):
    assert told(results, "overwritten") == ["NoVersionError"] * 3


def test_what_is_newer_is_found_by_the_next_question(results):
    assert told(results, "afterwards") == [4, [400.0, 401.0, 402.0]]


def test_two_saves_later_nothing_is_handed_out_to_other_nodes_any_more(results):
    for rank, result in results.items():
        assert result["rested"][rank] == 400.0 + rank
        # Of the two others one is the owner of the replica that lies on its node.
        assert result["rested"].count("NoVersionError") == 1


def test_a_rank_that_does_not_look_is_named_on_the_others_within_the_deadline():
    with memory_folder() as folder:
        nodes = nodes_of(folder / "base", 3)
        found = Life(node_bodies.look_on_in_vain, 3, None, 2, bases=nodes, seats=[0, 0, 0], absent=[1]).results()
    for result in found.values():
        assert "DeadlineExceededError: rank 1 did not answer" in result["found"]
        assert result["took"] < 5
