"""A link of the transport whose network is cut while it is built."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]


def test_connections_that_come_about_after_they_were_given_up_end_no_rank_and_the_next_one_stands(dcp_job):
    reports = dcp_job(Path(__file__).with_name("link_ranks.py"), 2).start("ask", (0, 1))
    assert reports == [{"before": True, "during": False, "after": True}] * 2
