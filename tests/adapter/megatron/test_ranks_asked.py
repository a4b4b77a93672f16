"""All ranks go on, or all raise, where one rank's store fails for a moment or a rank has missed a question."""

import pytest
import torch.distributed as dist

from tests.adapter.megatron.readiness_bodies import scenes
from tests.core.ranks import Life, memory_folder

pytestmark = pytest.mark.multiprocess
#: half of the deadline of those who wait for nobody
SOON_S = 15


@pytest.fixture(scope="module")
def ranks():
    """What each scene has given on each rank; all are played by one job."""
    with memory_folder() as base:
        found = Life(scenes, 2, base / "base", deadline_s=30).results()
    return lambda scene: [found[rank][scene] for rank in (0, 1)]


@pytest.mark.parametrize("scene", ["ready", "ready, tidying", "council", "council, tidying"])
def test_a_rank_whose_store_fails_for_a_moment_goes_on_with_the_others(ranks, scene):
    assert ranks(scene) == [[True, True]] * 2


@pytest.mark.parametrize("scene", ["broken before", "broken while it waits"])
@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="this torch makes no second connection")
def test_a_rank_whose_connection_to_the_store_breaks_goes_on_by_another_one(ranks, scene):
    assert ranks(scene) == [[True, True]] * 2


@pytest.mark.parametrize("scene", ["not counted", "counted"])
def test_a_rank_that_can_not_tell_whether_it_is_counted_does_as_the_others_do(ranks, scene):
    zero, one = ranks(scene)
    assert zero == one
    assert zero[1] is True


@pytest.mark.parametrize("scene", ["missed", "missed, rank 0 late", "missed first", "missed first, rank 0 late"])
def test_a_rank_that_has_missed_a_question_is_in_step_at_the_next(ranks, scene):
    zero, one = ranks(scene)
    assert zero[0][0] == "DeadlineExceededError"
    assert [answer for answer, _ in zero[1:] + one] == [True] * 4
    assert max(seconds for _, seconds in zero[1:] + one) < SOON_S


def test_a_rank_that_comes_late_to_a_question_is_told_so_and_in_step_at_the_next(ranks):
    for found in ranks("missed, and late"):
        assert [answer for answer, _ in found] == ["DeadlineExceededError", True, True]
        assert max(seconds for _, seconds in found) < SOON_S
