"""What a holder overwrites for a replica that comes in, and what it never does."""

import dataclasses
import json

import pytest

from mlflashpoint.core.arena import Arena, scan_seat
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.replicas import Parcel, Replicas
from mlflashpoint.core.rotation import Version
from mlflashpoint.errors import ReplicationError, ShardCorruptError, ShardFormatError, StoreFullError
from tests.core.ranks import state
from tests.core.shard_helpers import FIELDS, save


@pytest.fixture
def shard(tmp_path):
    """Makes shards as their owners would send them."""

    def make(rank, step, **fields):
        seat = tmp_path / f"{rank}-{step}-{len(list(tmp_path.iterdir()))}"
        seat.mkdir()
        save(seat, state(step, rank), step=step)[0].close()
        held = Holding.open(seat / "slot-0")
        record = dataclasses.replace(held.record, rank=rank, world_size=8, **fields)
        return Holding(record, held.index, held.data)

    return make


def sink(seat, *, obsolete=lambda record: False):
    return Replicas(seat, job_id=FIELDS["job_id"], group=FIELDS["group"], obsolete=obsolete)


def receive(replicas, holding, *, keep=()):
    """Take a shard in as a replicator does."""
    header = Parcel(holding.record, frozenset(Version(*version) for version in keep)).to_bytes()
    source = holding.record.rank
    buffers = replicas.allocate(source, header, tuple(len(buffer) for buffer in holding.buffers))
    for target, given in zip(buffers, holding.buffers, strict=True):
        target[:] = given
    replicas.commit(source, header, buffers)


def held(seat):
    return sorted((slot.record.rank, slot.record.step) for slot in scan_seat(seat) if slot.record and slot.replica)


def test_a_replica_that_its_owner_still_needs_is_never_overwritten(seat, shard):
    replicas = sink(seat)
    receive(replicas, shard(3, 1))
    receive(replicas, shard(3, 2), keep=[(1, 1)])
    assert held(seat) == [(3, 1), (3, 2)]
    receive(replicas, shard(3, 3), keep=[(1, 2)])
    assert held(seat) == [(3, 2), (3, 3)]
    receive(replicas, shard(3, 4), keep=[(1, 2), (1, 3)])
    assert held(seat) == [(3, 2), (3, 3), (3, 4)]


def test_the_owner_of_one_shard_has_no_say_over_anothers(seat, shard):
    replicas = sink(seat)
    receive(replicas, shard(3, 1))
    receive(replicas, shard(4, 1))
    receive(replicas, shard(4, 2))
    assert held(seat) == [(3, 1), (4, 2)]


def test_a_strangers_replica_goes_when_nobody_can_need_it(seat, shard):
    gone = []
    replicas = sink(seat, obsolete=lambda record: record.rank in gone)
    receive(replicas, shard(3, 1))
    receive(replicas, shard(4, 1))
    gone.append(3)
    receive(replicas, shard(4, 2), keep=[(1, 1)])
    assert held(seat) == [(4, 1), (4, 2)]


def test_what_is_adopted_from_a_predecessor_is_protected_likewise(seat, shard):
    first = sink(seat)
    receive(first, shard(3, 1))
    first.close()
    second = sink(seat)
    receive(second, shard(3, 2), keep=[(1, 1)])
    assert held(seat) == [(3, 1), (3, 2)]


def test_a_shard_that_is_not_what_was_sent_is_refused_and_leaves_nothing(seat, shard):
    replicas = sink(seat)
    given = shard(3, 1)
    header = Parcel(given.record, frozenset()).to_bytes()
    buffers = replicas.allocate(3, header, tuple(len(buffer) for buffer in given.buffers))
    for target, source in zip(buffers, given.buffers, strict=True):
        target[:] = source
    buffers[1][70] ^= 1
    with pytest.raises(ShardCorruptError):
        replicas.commit(3, header, buffers)
    replicas.abandon(3, header, ShardCorruptError("digest"))
    assert held(seat) == []
    assert not replicas.receiving
    # Its slot is used again.
    receive(replicas, given)
    assert len(scan_seat(seat)) == 1


def test_the_slot_of_a_shard_that_is_coming_in_is_given_to_no_other(seat, shard):
    replicas = sink(seat)
    one, two = shard(3, 1), shard(4, 1)
    header = Parcel(one.record, frozenset()).to_bytes()
    buffers = replicas.allocate(3, header, tuple(len(buffer) for buffer in one.buffers))
    receive(replicas, two)
    with pytest.raises(ReplicationError, match="still being taken in"):
        replicas.allocate(3, header, tuple(len(buffer) for buffer in one.buffers))
    for target, given in zip(buffers, one.buffers, strict=True):
        target[:] = given
    replicas.commit(3, header, buffers)
    assert held(seat) == [(3, 1), (4, 1)]


@pytest.mark.parametrize("odd", [{"job_id": "other"}, {"group": "other"}, {"rank": 5}])
def test_a_shard_of_another_job_group_or_rank_is_refused(seat, shard, odd):
    given = shard(3, 1)
    record = dataclasses.replace(given.record, **odd)
    with pytest.raises(ReplicationError, match="from rank 3"):
        sink(seat).allocate(3, Parcel(record, frozenset()).to_bytes(), tuple(len(b) for b in given.buffers))
    assert scan_seat(seat) == []


@pytest.mark.parametrize("header", [b"", b"[]", b"{}", b'{"record": {}, "keep": []}', b'{"keep": [[1]]}', b"\xff"])
def test_a_malformed_header_is_an_error_and_no_crash(seat, header):
    with pytest.raises((ReplicationError, ShardFormatError)):
        sink(seat).allocate(3, header, (1, 2))


def test_sizes_that_the_record_does_not_name_are_refused(seat, shard):
    given = shard(3, 1)
    header = Parcel(given.record, frozenset()).to_bytes()
    with pytest.raises(ReplicationError, match="not what its record says"):
        sink(seat).allocate(3, header, (given.record.index_bytes, given.record.data_bytes + 1))


def test_no_room_names_need_and_have_and_harms_no_replica(seat, shard, monkeypatch):
    replicas = sink(seat)
    receive(replicas, shard(3, 1))
    another = shard(4, 1)
    monkeypatch.setattr("mlflashpoint.core.arena.free_bytes", lambda folder: 4096)
    with pytest.raises(StoreFullError, match=r"rank 4: 1 slots of \d+ bytes need \d+ more bytes, the store has 4096"):
        receive(replicas, another)
    assert held(seat) == [(3, 1)]


def test_a_parcel_comes_back_as_it_was(shard):
    parcel = Parcel(shard(3, 1).record, frozenset({Version(1, 2), Version(2, 1)}))
    assert Parcel.from_bytes(parcel.to_bytes()) == parcel
    assert set(json.loads(parcel.to_bytes())) == {"record", "keep"}


def test_own_slots_are_not_touched(seat, shard):
    save(seat, state(9, 0), step=9)[0].close()
    receive(sink(seat), shard(3, 1))
    arena = Arena(seat)
    arena.adopt()
    assert [slot.record and slot.record.step for slot in arena.slots] == [9, None]
