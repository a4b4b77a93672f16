"""Which version several processes agree on when each sees other ones on its node."""

from mlflashpoint.core.node_versions import _choose

OLD, NEW = [1, "run", 10, 2, ""], [1, "run", 20, 2, ""]


def test_the_newest_that_every_process_sees_is_chosen():
    assert _choose([[NEW, OLD], [OLD]]) == {"problem": None, "version": OLD}
    assert _choose([[OLD], [NEW, OLD]]) == {"problem": None, "version": OLD}


def test_without_a_common_version_there_is_none():
    assert _choose([[NEW], [OLD]]) == {"problem": None, "version": None}


def test_a_process_with_a_problem_or_without_an_answer_is_told_to_all():
    assert _choose([[NEW], "no permission"])["problem"] == "no permission"
    assert "did not say" in _choose(None)["problem"]
