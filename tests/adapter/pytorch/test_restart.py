"""A killed job that starts again on another number of ranks finds its newest version and loads it bit for bit."""

import shutil
import uuid
from pathlib import Path

import pytest

from tests.adapter.pytorch import launch

pytestmark = pytest.mark.multiprocess
STARTS = (("begin", 2), ("go on", 4), ("look", 2), ("look", 3))


@pytest.fixture(scope="module")
def starts(warm, tmp_path_factory):
    """Reports of each start of one job, by what it does and its number of ranks."""
    folder = tmp_path_factory.mktemp("restart")
    base = Path(f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}")
    base.mkdir(mode=0o700)
    try:
        yield {
            (what, ranks): launch.fork(
                warm.zygote(False),
                Path(__file__).parent / "restart_worker.py",
                ranks,
                [what, base, folder / "durable"],
                folder / f"{what}-{ranks}",
            )
            for what, ranks in STARTS
        }
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_after_a_kill_in_the_middle_of_an_async_save_the_version_before_is_found(starts):
    assert [report["latest"][-len("/step-10_ckpt") :] for report in starts["go on", 4]] == ["/step-10_ckpt"] * 4


@pytest.mark.parametrize(("start", "step"), [(("go on", 4), 10), (("look", 2), 30), (("look", 3), 30)])
def test_a_version_is_loaded_on_another_number_of_ranks_bit_for_bit(starts, start, step):
    for report in starts[start]:
        assert report["latest"].endswith(f"/step-{step}_ckpt")
        assert report["differing"] == []
        assert not report["untouched"]


def test_a_version_that_each_rank_saved_for_itself_is_refused_on_another_number_of_ranks(starts):
    assert [report["alone"] for report in starts["look", 2]] == [None, None]
    for report in starts["look", 3]:
        kind, text = report["alone"]
        assert kind == "TopologyMismatchError"
        assert "saved by 2 ranks" in text and "the job has 3" in text
