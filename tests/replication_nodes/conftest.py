"""Makes the nodes that a test asks for, and removes them however it ends."""

import os

import pytest

from tests.replication_nodes.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def nodes_allowed():
    reason = why_not()
    if reason:
        assert not os.environ.get("REQUIRE_NETNS"), reason
        pytest.skip(f"NOT RUN: tests on real nodes need network namespaces, and {reason}")


@pytest.fixture
def cluster(nodes_allowed):
    made = []

    def make(count, **options):
        made.append(Cluster(count, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
