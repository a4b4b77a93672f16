import datetime
import time

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import MAX_RECORD_BYTES, Channel, poll
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.errors import DeadlineExceededError, PeerError


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 1)
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20))
    return server if request.param == "tcp" else dist.PrefixStore("worker/attempt_0", server)


def test_a_record_that_is_not_there_is_read_as_none_at_once(store):
    started = time.monotonic()
    assert Channel(store, "p").read("nothing") is None
    assert time.monotonic() - started < 5
    assert Channel(store, "p").read("nothing") is None


def test_records_counters_and_decisions_are_shared_under_one_prefix(store):
    one, other, apart = Channel(store, "p"), Channel(store, "p"), Channel(store, "q")
    one.post("key", {"a": [1, None, "é"]})
    assert other.read("key") == {"a": [1, None, "é"]}
    assert apart.read("key") is None
    assert (one.add("n"), other.add("n"), other.add("n", 0)) == (1, 2, 2)
    assert one.decide("d", [True]) == [True]
    assert other.decide("d", [False]) == [True]
    assert one.under("x").read("key") is None
    one.post_many({f"m/{index}": index for index in range(1100)})
    assert other.read_many([f"m/{index}" for index in range(1100)]) == list(range(1100))


def test_reading_many_of_which_one_is_missing_is_an_error_and_no_wait(store):
    channel = Channel(store, "p")
    channel.post("a", 1)
    with pytest.raises(PeerError, match="missing"):
        channel.read_many(["a", "b"])


def test_a_record_that_is_too_large_is_refused_and_the_store_lives_on(store):
    channel = Channel(store, "p")
    with pytest.raises(PeerError, match="exceeds"):
        channel.post("big", "x" * MAX_RECORD_BYTES)
    foreign = dist.PrefixStore("p", store)
    foreign.set("foreign", "x" * (MAX_RECORD_BYTES + 1))
    # A TCPStore does not wait for what it sets: only an answer on the same connection tells that it is there.
    assert len(foreign.get("foreign")) > MAX_RECORD_BYTES
    with pytest.raises(PeerError, match="exceeds"):
        channel.read("foreign")
    assert channel.add("n") == 1


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x80\x04K\x01."])
def test_what_is_not_json_is_named_and_nothing_is_unpickled(text):
    store = dist.HashStore()
    dist.PrefixStore("p", store).set("bad", text)
    with pytest.raises(PeerError, match="bad"):
        Channel(store, "p").read("bad")


def test_a_store_whose_host_is_gone_is_one_line_of_error():
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, None, False, timeout=datetime.timedelta(seconds=5))
    channel = Channel(client, "p", clone=False)
    channel.post("a", 1)
    del server
    with pytest.raises(PeerError) as caught:
        for _ in range(50):
            channel.add("n")
            time.sleep(0.05)
    assert "\n" not in str(caught.value)
    assert "alive" in str(caught.value)


def test_polling_ends_at_the_deadline():
    started = time.monotonic()
    assert poll(lambda: None, Deadline(0.2), world_size=2) is None
    assert 0.2 <= time.monotonic() - started < 10
    assert poll(lambda: 0, Deadline(5), world_size=2) == 0


def test_a_call_that_never_comes_back_is_left_at_the_deadline():
    with pytest.raises(DeadlineExceededError, match="asking took longer"):
        bounded(lambda: time.sleep(30), 0.1, "asking")


def test_a_bounded_call_gives_back_its_value_or_raises_its_error():
    assert bounded(lambda: 7, 5, "x") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 5, "x")
