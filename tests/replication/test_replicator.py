"""Shards reach their holders in the background, checked, and failures are told and not waited for."""

from __future__ import annotations

import logging
import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mlflashpoint.errors import ReplicationError
from mlflashpoint.replication.delivery import OutgoingShard
from mlflashpoint.replication.replicator import Replicator
from mlflashpoint.replication.transport import Identity
from tests.replication import peers
from tests.replication.sinks import MemorySink, shard

pytestmark = pytest.mark.multiprocess
MIB = 1 << 20


class Ranks:
    """Replicators of several ranks on one store, in this process."""

    def __init__(self, count, *, k=1, timeout_s=20.0, first=0, rooms=None, **options):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        self.sinks = [MemorySink((rooms or {}).get(rank, 1 << 40)) for rank in range(count)]
        self.all = []
        for rank, sink in enumerate(self.sinks):
            transport = peers.make_transport("gloo", self.prefixed(), Identity("job", "default", 1, rank))
            holders = [(rank + j) % count for j in range(1, k + 1)] if count > 1 else []
            self.all.append(Replicator(transport, holders=holders, sink=sink, timeout_s=timeout_s, **options))

    def prefixed(self):
        return dist.PrefixStore("replication", self.store)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for replicator in self.all:
            replicator.close(timeout_s=10)


def test_every_rank_gets_the_shards_whose_holder_it_is():
    with Ranks(3, k=2) as ranks:
        data = [peers.pattern(rank, 5 * MIB + rank) for rank in range(3)]
        deliveries = [replicator.submit(shard(data[rank])) for rank, replicator in enumerate(ranks.all)]
        assert all(delivery.wait(30) and delivery.ok for delivery in deliveries)
        assert deliveries[0].acknowledged == {1, 2} and not deliveries[0].errors
        for rank, sink in enumerate(ranks.sinks):
            assert {owner: kept[1] for owner, kept in sink.replicas.items()} == {
                owner: data[owner] for owner in range(3) if owner != rank
            }


def test_a_shard_whose_digest_is_wrong_at_the_receiver_is_never_acknowledged():
    with Ranks(2) as ranks:
        delivery = ranks.all[0].submit(shard(b"x" * 1000, digest="0" * 16))
        assert delivery.wait(30) and not delivery.ok and "digest differs" in str(delivery.errors[1])
        assert not ranks.sinks[1].replicas and ranks.sinks[1].abandoned == [(0, "ShardCorruptError")]
        assert ranks.all[0].lag().failed == 1 and ranks.all[1].lag().refused == 1


def test_a_holder_without_room_refuses_and_the_others_still_get_their_replica():
    with Ranks(3, k=2, rooms={1: 10}) as ranks:
        delivery = ranks.all[0].submit(shard(b"x" * 1000, step=40))
        assert delivery.wait(30) and delivery.acknowledged == {2}
        error = delivery.errors[1]
        assert error.rank == 1 and error.step == 40 and "need 1000 and have 10" in str(error)
        assert "need 1000" in ranks.all[0].lag().last_error


def test_submit_never_blocks_and_refuses_more_than_the_queue_holds():
    with Ranks(2, timeout_s=3.0, queue_depth=2) as ranks:
        held = threading.Event()
        ranks.sinks[1].commit = lambda *_: held.wait(20)
        first, second = (ranks.all[0].submit(shard(b"x" * 300, step=step)) for step in (1, 2))
        with pytest.raises(ReplicationError, match="2 shards are still on their way") as caught:
            ranks.all[0].submit(shard(b"x", step=3))
        assert caught.value.step == 3
        lag = ranks.all[0].lag()
        assert ranks.all[0].busy() and not ranks.all[0].wait_idle(0.05)
        assert lag.shards_outstanding == 2 and 300 <= lag.bytes_outstanding <= 600 and lag.age_s > 0
        held.set()
        assert first.wait(20) and second.wait(20) and ranks.all[0].wait_idle(20)
        assert ranks.all[0].lag().bytes_outstanding == 0 and ranks.all[0].lag().acknowledged == 2


def test_without_holders_a_delivery_is_done_at_once():
    with Ranks(1) as ranks:
        seen = []
        delivery = ranks.all[0].submit(shard(b"x"))
        delivery.add_done_callback(seen.append)
        assert delivery.done and delivery.ok and seen == [delivery] and not ranks.all[0].busy()


def test_callbacks_run_once_and_their_faults_harm_nobody():
    with Ranks(2) as ranks:
        seen = []
        delivery = ranks.all[0].submit(shard(b"x" * MIB))
        delivery.add_done_callback(lambda _: 1 / 0)
        delivery.add_done_callback(lambda d: seen.append(d.ok))
        assert ranks.all[0].wait_idle(20) and delivery.wait(20)
        assert ranks.all[0].submit(shard(b"y")).wait(20) and seen == [True]


def test_a_sink_that_raises_something_unexpected_refuses_that_shard_only():
    with Ranks(2) as ranks:
        allocate = ranks.sinks[1].allocate
        ranks.sinks[1].allocate = lambda *_: 1 / 0
        failed = ranks.all[0].submit(shard(b"x" * 100))
        assert failed.wait(20) and "ZeroDivisionError" in str(failed.errors[1])
        ranks.sinks[1].allocate = allocate
        assert ranks.all[0].submit(shard(b"x" * 100)).wait(20) and 0 in ranks.sinks[1].replicas


def test_a_sink_that_fails_to_give_up_a_shard_still_lets_the_owner_know():
    with Ranks(2) as ranks:
        ranks.sinks[1].abandon = lambda *_: 1 / 0
        failed = ranks.all[0].submit(shard(b"x" * 100, digest="0" * 16))
        assert failed.wait(20) and "digest differs" in str(failed.errors[1])


def test_replicas_are_rebuilt_on_chosen_ranks_after_a_recovery():
    with Ranks(3) as ranks:
        delivery = ranks.all[0].submit(shard(b"recovered", step=7), holders=[2])
        assert delivery.wait(20) and delivery.acknowledged == {2}
        assert ranks.sinks[2].replicas[0][1] == b"recovered" and not ranks.sinks[1].replicas


def test_an_offered_shard_is_fetched_and_a_withdrawn_one_is_not():
    from mlflashpoint.replication.gather import Source
    from tests.replication.sinks import check

    with Ranks(2) as ranks:
        mine = shard(b"abc" * 1000)
        ranks.all[0].offer("own", mine, timeout_s=5)
        arguments = {
            "allocate": lambda _, sizes: [memoryview(bytearray(size)) for size in sizes],
            "verify": check,
            "timeout_s": 20,
        }
        got = ranks.all[1].fetch([Source(0, "own")], **arguments)
        assert b"".join(got.buffers) == b"abc" * 1000 and got.header == mine.header
        ranks.all[0].withdraw("own", timeout_s=5)
        with pytest.raises(ReplicationError, match="'own'"):
            ranks.all[1].fetch([Source(0, "own")], **arguments)


def test_close_fails_what_is_on_its_way_and_leaves_no_thread():
    before = set(threading.enumerate())
    with Ranks(2, timeout_s=60) as ranks:
        held = threading.Event()
        ranks.sinks[1].commit = lambda *_: held.wait(20)
        deliveries = [ranks.all[0].submit(shard(b"x" * 100, step=step)) for step in (1, 2)]
        ranks.all[0].close(timeout_s=10)
        assert all(delivery.wait(10) and not delivery.ok for delivery in deliveries)
        with pytest.raises(ReplicationError, match="closed"):
            ranks.all[0].submit(shard(b"x"))
        held.set()
    assert not [t for t in set(threading.enumerate()) - before if "mlflashpoint" in t.name]


def test_a_holder_that_dies_costs_one_error_and_its_successor_takes_the_next_shard(caplog):
    with Ranks(1) as ranks:
        holder = peers.Peer("gloo", ranks.store.port, 1)
        mine = ranks.all[0]
        try:
            holder.ask("replicate", holders=[])
            assert _deliver(mine, 1).ok
            holder.signal(signal.SIGKILL)
            holder.stop()
            with caplog.at_level(logging.DEBUG, logger="mlflashpoint.replication"):
                for step in (2, 3):
                    lost = _deliver(mine, step, timeout_s=1.0)
                    assert not lost.ok and lost.errors[1].rank == 1 and lost.errors[1].step == step
                told = [r for r in caplog.records if r.levelno == logging.WARNING]
                assert len(told) == 1 and "replicas to rank 1 fail" in told[0].getMessage()
                holder = peers.Peer("gloo", ranks.store.port, 1)
                holder.ask("replicate", holders=[])
                assert _deliver(mine, 4).ok
            assert "replicas to rank 1 arrive again" in caplog.text
            assert holder.ask("replicas")["0"][0].startswith("4:")
            assert (mine.lag().acknowledged, mine.lag().failed) == (2, 2)
        finally:
            holder.stop()


def _deliver(replicator, step, timeout_s=20.0):
    delivery = replicator.submit(shard(peers.pattern(step, MIB), step=step), holders=[1], timeout_s=timeout_s)
    assert delivery.wait(40)
    return delivery


def test_a_shard_with_a_header_over_the_cap_fails_alone():
    with Ranks(2) as ranks:
        failed = ranks.all[0].submit(OutgoingShard(b"h" * (1 << 20), [memoryview(b"x")], step=1))
        assert failed.wait(20) and "header" in str(failed.errors[1])
        assert ranks.all[0].submit(shard(b"x" * 9)).wait(20) and 0 in ranks.sinks[1].replicas
