"""One shard is pulled from all its copies at once, and a bad or dead copy costs no more than its own share."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mlflashpoint.errors import DeadlineExceededError, ReplicationError, ShardCorruptError, StoreFullError
from mlflashpoint.replication.gather import Source, gather
from mlflashpoint.replication.transport import Identity
from tests.replication import peers
from tests.replication.sinks import check, shard

pytestmark = pytest.mark.multiprocess
MIB = 1 << 20
DATA = peers.pattern(1, 24 * MIB + 5)


class Fabric:
    """Ranks 0 to 2 in this process, and rank 3 in another one."""

    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        self.ranks = [
            peers.make_transport(
                "gloo", dist.PrefixStore("replication", self.store), Identity("job", "default", 1, rank)
            )
            for rank in range(3)
        ]
        self.peer = peers.Peer("gloo", self.store.port, 3)
        self.peer.ask("ready")

    def offer(self, rank, given, key="k"):
        self.ranks[rank].offer(key, given.header, given.buffers, timeout_s=5)


@pytest.fixture(scope="module")
def fabric():
    made = Fabric()
    yield made
    made.peer.stop()
    for transport in made.ranks:
        transport.close(timeout_s=10)


def pull(transport, ranks, **options):
    sources = [Source(rank, "k") for rank in ranks]

    def allocate(header, sizes):
        return [memoryview(bytearray(b"\xee" * size)) for size in sizes]

    options = {"allocate": allocate, "verify": check, "timeout_s": 30, "range_bytes": 2 * MIB, **options}
    return gather(transport, sources, **options)


class Together:
    """The real transport, where the first range from each of two sources is asked for at the same moment."""

    def __init__(self, transport):
        self._transport = transport
        self._barrier = threading.Barrier(2)
        self._met = set()
        self.rank = transport.rank
        self.describe = transport.describe

    def fetch(self, peer, *arguments, **keywords):
        if peer not in self._met:
            self._met.add(peer)
            self._barrier.wait(20)
        self._transport.fetch(peer, *arguments, **keywords)


def test_several_sources_serve_ranges_of_one_shard_at_once(fabric):
    given = shard(DATA)
    fabric.offer(1, given)
    fabric.offer(2, given)
    got = pull(Together(fabric.ranks[0]), [1, 2])
    assert b"".join(got.buffers) == DATA and got.header == given.header and not got.failures
    assert set(got.bytes_from) == {1, 2} and sum(got.bytes_from.values()) == len(DATA)


def test_a_source_without_the_shard_is_named_and_the_other_serves_it_all(fabric):
    fabric.offer(1, shard(DATA))
    fabric.ranks[2].withdraw("k", timeout_s=5)
    got = pull(fabric.ranks[0], [2, 1])
    assert b"".join(got.buffers) == DATA and got.bytes_from == {1: len(DATA)}
    assert [(source.rank, type(error)) for source, error in got.failures.items()] == [(2, ReplicationError)]


@pytest.mark.parametrize("bad", [1, 2])
def test_of_two_copies_the_corrupt_one_is_found_and_named(fabric, bad):
    broken = bytearray(DATA)
    broken[5] ^= 1
    broken[-5] ^= 1
    good = shard(DATA)
    digest = good.header.decode().split(":")[1]
    for rank in (1, 2):
        fabric.offer(rank, shard(bytes(broken), digest=digest) if rank == bad else good)
    got = pull(Together(fabric.ranks[0]), [1, 2], range_bytes=len(DATA) // 2 + 1)
    assert b"".join(got.buffers) == DATA and got.bytes_from == {3 - bad: len(DATA)}
    named = {source.rank: type(error) for source, error in got.failures.items()}
    # the good one may be tried first, and then nobody needs to know how bad the other one is
    assert named in ({bad: ShardCorruptError}, {}) and (bad == 2 or named)


def test_when_all_copies_are_corrupt_the_error_names_each(fabric):
    for rank in (1, 2):
        fabric.offer(rank, shard(DATA, digest="0" * 16))
    with pytest.raises(ReplicationError, match=r"rank 1: digest differs; rank 2: digest differs"):
        pull(fabric.ranks[0], [1, 2])


def test_a_source_that_stalls_hands_its_range_to_the_others(fabric):
    size = 24 * MIB
    given = shard(peers.pattern(77, size))
    fabric.peer.ask("offer_shard", key="k", seed=77, size=size)
    fabric.offer(1, given)
    assert fabric.ranks[0].describe(3, "k", timeout_s=20)[0] == given.header
    fabric.peer.signal(signal.SIGSTOP)
    try:
        got = pull(fabric.ranks[0], [3, 1], stall_s=1.0)
        assert b"".join(got.buffers) == peers.pattern(77, size) and got.bytes_from == {1: size}
        assert all(isinstance(error, DeadlineExceededError) for error in got.failures.values())
    finally:
        fabric.peer.signal(signal.SIGCONT)
    got = pull(fabric.ranks[0], [3])
    assert got.bytes_from == {3: size} and b"".join(got.buffers) == peers.pattern(77, size)


class SlowOnce(Together):
    """The real transport, where the first range from one source does not come in time."""

    def __init__(self, transport, slow):
        super().__init__(transport)
        self._slow = [slow]

    def fetch(self, peer, *arguments, **keywords):
        if peer in self._slow:
            self._slow.remove(peer)
            raise DeadlineExceededError("no bytes in time", rank=peer)
        self._transport.fetch(peer, *arguments, **keywords)


def test_a_source_that_was_too_slow_for_the_others_is_still_the_last_hope(fabric):
    fabric.offer(1, shard(DATA))
    fabric.ranks[2].withdraw("k", timeout_s=5)
    got = pull(SlowOnce(fabric.ranks[0], 1), [1, 2])
    assert b"".join(got.buffers) == DATA and got.bytes_from == {1: len(DATA)}
    assert [source.rank for source in got.failures] == [2]


def test_a_source_that_offers_another_shard_is_left_out(fabric):
    fabric.offer(1, shard(DATA, step=4))
    fabric.offer(2, shard(DATA[:-1], step=3))
    got = pull(fabric.ranks[0], [2, 1], header=shard(DATA, step=4).header)
    assert b"".join(got.buffers) == DATA and got.bytes_from == {1: len(DATA)}
    assert "another shard" in str(next(iter(got.failures.values())))


def test_no_room_for_the_shard_is_told_as_it_is(fabric):
    fabric.offer(1, shard(DATA))

    def full(header, sizes):
        raise StoreFullError("need more than have")

    with pytest.raises(StoreFullError, match="need more"):
        pull(fabric.ranks[0], [1], allocate=full)


def test_an_empty_shard_is_pulled_too(fabric):
    fabric.offer(1, shard(b""))
    got = pull(fabric.ranks[0], [1])
    assert [len(buffer) for buffer in got.buffers] == [0, 0] and not got.failures


def test_no_sources_are_an_error_and_not_a_wait(fabric):
    with pytest.raises(ReplicationError, match="0 sources"):
        pull(fabric.ranks[0], [])
