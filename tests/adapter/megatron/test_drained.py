"""SIGTERM drains what ``dist_checkpointing`` has in memory; all of that is lost, and the next start goes on from it."""

import shutil

import pytest

from tests.adapter.megatron.conftest import BOTH_LOADS

pytestmark = [pytest.mark.multiprocess, pytest.mark.parametrize("job", BOTH_LOADS[-1:], indirect=True)]


def test_what_sigterm_drains_is_gone_on_from_bit_for_bit_when_all_memory_is_lost(job):
    ended = job.said("drained_worker", 2, "terminate", "goes_on")
    shutil.rmtree(job.base / "drained")
    assert ended == job.said("drained_worker", 2, "resume", "goes_on")
    assert [result["step"] for result in ended] == [2, 2]
