"""SIGTERM drains what the library has in memory; all of that is lost, and the next start finds what was drained."""

from pathlib import Path

import pytest

from tests.adapter.pytorch.script.jobs import Job

pytestmark = pytest.mark.multiprocess

LIBRARY = Path(__file__).with_name("library.py")


@pytest.mark.parametrize("by", ["sync", "process"])
def test_the_library_finds_what_was_drained(tmp_path, warm, by):
    job = Job(tmp_path, warm=warm, DRAIN_DIR=str(tmp_path / "drain"), DCP_MODE="augment")
    try:
        job.start("--by", by, "--terminated", script=LIBRARY, fails=True)
        job.forget_memory()
        found = job.start(script=LIBRARY)
    finally:
        job.close()
    assert found == [{"found": 2, "sum": 2 * (4950 + 100 * rank)} for rank in range(2)]
