"""The metadata of a save stays in the job's store until the slowest rank has read it; it is sent once a structure."""

import pytest

from mlflashpoint.adapter.pytorch.finish import Bulletin
from mlflashpoint.adapter.pytorch.shards import unpack
from mlflashpoint.core.channel import Channel, HashStore


@pytest.fixture
def ranks():
    """The bulletins of a coordinator and of another rank, in stores with three slots."""
    store = HashStore()
    return [Bulletin(lambda: Channel(store, "dcp", clone=False), under_way=3) for _ in range(2)]


def test_a_rank_that_is_as_many_saves_behind_as_it_has_slots_finds_each_ones_metadata(ranks):
    coordinator, slow = ranks
    digests = [coordinator.post(text)[0] for text in (b"one", b"two", b"three")]
    assert [unpack(slow.read(digest)) for digest in digests] == [b"one", b"two", b"three"]


def test_a_structure_that_comes_back_stays_as_if_it_were_new(ranks):
    coordinator, slow = ranks
    digests = [coordinator.post(text)[0] for text in (b"one", b"two", b"three", b"one", b"four")]
    assert [unpack(slow.read(digest)) for digest in digests[2:]] == [b"three", b"one", b"four"]


def test_what_no_save_under_way_needs_is_taken_out_of_the_jobs_store(ranks):
    coordinator, slow = ranks
    first = coordinator.post(b"one")[0]
    for text in (b"two", b"three", b"four"):
        coordinator.post(text)
    with pytest.raises(Exception, match="not in the job's store"):
        slow.read(first)


def test_a_structure_is_sent_once(ranks):
    coordinator, _ = ranks
    sent = []
    channel = coordinator.channel
    post = channel.post
    channel.post = lambda key, value: (sent.append(key), post(key, value))
    for _ in range(3):
        coordinator.post(b"one")
    assert len(sent) == 2
