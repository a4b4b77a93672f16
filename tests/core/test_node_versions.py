"""Which version several processes agree on when each sees other ones on its node."""

import pytest
import torch.distributed as dist

from mlflashpoint.core.node_versions import _choose
from tests.core.bodies import keys_after, seen_on_node
from tests.core.ranks import Life, memory_folder

OLD, NEW = [1, "run", 10, 2, ""], [1, "run", 20, 2, ""]


def test_the_newest_that_every_process_sees_is_chosen():
    assert _choose([[NEW, OLD], [OLD]]) == {"problem": None, "version": OLD}
    assert _choose([[OLD], [NEW, OLD]]) == {"problem": None, "version": OLD}


def test_without_a_common_version_there_is_none():
    assert _choose([[NEW], [OLD]]) == {"problem": None, "version": None}


def test_a_process_with_a_problem_or_without_an_answer_is_told_to_all():
    assert _choose([[NEW], "no permission"])["problem"] == "no permission"
    assert "ranks 1, 3 did not answer" in _choose([[NEW], None, [OLD], None])["problem"]


@pytest.mark.multiprocess
def test_processes_in_the_store_of_dead_ones_agree_on_what_they_see_themselves(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert Life(seen_on_node, 2, tmp_path, [10], store=store).results() == {0: 10, 1: 10}
    assert Life(seen_on_node, 2, tmp_path, [20, 10], 0.5, store=store).results() == {0: 20, 1: 20}


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["newest_on_nodes", "find_latest", "onlooker"])
def test_calls_that_find_the_newest_version_leave_no_more_keys_in_the_jobs_store_the_more_there_are(what):
    with memory_folder() as base:
        assert Life(keys_after, 2, base / "base", what, 10).results() == {0: 0, 1: 0}
