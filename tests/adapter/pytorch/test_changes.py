"""Saves that differ from the one before, or from rank to rank, on two real ranks in one launch."""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """``(base container's folder, report of each rank)``."""
    folder = tmp_path_factory.mktemp("changes")
    with memory_folder() as base:
        yield base, launch.launch(Path(__file__).parent / "changes_worker.py", 2, [base], folder)


@pytest.fixture
def said(job):
    """Scenario -> what each rank reports of it; a scenario that broke fails the test with its traceback."""

    def of(scenario):
        found = [report.get(scenario, {"error": "it was not reached"}) for report in job[1]]
        broken = [result["error"] for result in found if isinstance(result, dict) and "error" in result]
        assert not broken, "\n".join(broken)
        return found

    return of


def test_structures_may_change_in_turn_while_the_background_is_late(said):
    for result in said("structures_in_turn_while_the_background_is_late"):
        assert result["failures"] == {}
        assert result["newest"] == ["step-3_ckpt", "3", "{3.0}"]


def test_one_writer_serves_saves_of_all_ranks_and_of_each_for_itself_in_turn(said):
    assert said("a_save_of_all_ranks_after_one_of_each_for_itself") == [[True] * 5] * 2
