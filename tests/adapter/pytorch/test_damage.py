"""Bytes that were damaged after they were found good are an error of a load, never values of the state."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from mlflashpoint.adapter.pytorch import MemoryStorageReader, ReadOnlyStore, checked_copies
from mlflashpoint.core.arena import file_of, scan_seat
from mlflashpoint.errors import ShardCorruptError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def later(monkeypatch):
    """The load comes long after the version was found and checked."""
    monkeypatch.setattr(checked_copies, "TRUST_S", 0.0)


def state(value):
    tensors = {
        "large": torch.full((1 << 20,), value),
        "small": torch.full((10,), value + 1),
        "turned": torch.full((700, 500), value + 2).T,
        "none": torch.empty(0),
    }
    return {**tensors, "note": {"text": str(value) * 3000}}


def slot(store, step):
    (found,) = [
        slot.path
        for slot in scan_seat(Path(store.base) / "default" / "seat-0")
        if slot.record is not None and slot.record.step == step
    ]
    return found


def overwrite(store, step, old, new):
    """Put the bytes ``new`` where ``old`` lie in the data of ``step``, by a write to the file."""
    with open(file_of(slot(store, step), "data"), "r+b") as data:
        at = data.read().index(old)
        data.seek(at)
        data.write(new)


def damage(store, part):
    """Damage one tensor of version 2, or its text, or all."""
    if part == "all":
        with open(file_of(slot(store, 2), "data"), "r+b") as data:
            length = len(data.read())
            data.seek(0)
            data.write(bytes(length))
    elif part == "note":
        overwrite(store, 2, b"2.0" * 30, b"2.1")
    else:
        value = float(state(2.0)[part].reshape(-1)[0])
        whole = torch.full((10,), value).numpy().tobytes()
        overwrite(store, 2, whole, torch.full((10,), 666.0).numpy().tobytes())


@pytest.fixture(params=["found", "by name", "read only"])
def reader(store, request):
    """A reader of version 2, the newest, as its three kinds of user have it."""
    for step in (1, 2):
        dcp.save(
            state(float(step)), checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner
        )
    if request.param == "found":
        assert store.latest() == store.version(2)
        return store.reader
    store.runtime.flush()
    if request.param == "by name":
        return MemoryStorageReader(store.version(2))
    return ReadOnlyStore(store.base).reader


def refused(store, reader, into, **options):
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, checkpoint_id=store.version(2), storage_reader=reader, **options)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, ShardCorruptError), repr(error)
    assert (error.rank, error.step, error.path) == (0, 2, str(slot(store, 2)))
    assert "latest" in error.remedy or "another copy" in error.remedy
    return error


PARTS = ["large", "small", "turned", "note", "all"]


@pytest.mark.parametrize("part", PARTS)
def test_damage_before_a_load_is_refused_by_name(later, store, reader, part):
    damage(store, part)
    into = state(9.0)
    error = refused(store, reader, into)
    assert part == "all" or part in str(error)
    assert into["note"] == state(9.0)["note"]


@pytest.mark.parametrize("part", PARTS)
def test_damage_during_a_load_is_refused_by_name(later, store, reader, part):
    class Damaging(DefaultLoadPlanner):
        def create_local_plan(self):
            damage(store, part)
            return super().create_local_plan()

    refused(store, reader, state(9.0), planner=Damaging())


def test_damage_is_refused_where_only_a_part_of_the_tensor_is_wanted(later, store, reader):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Half(DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([1 << 19]))
            described = self.metadata.state_dict_metadata["large"]
            plan.items[:] = create_read_items_for_chunk_list("large", described, [chunk])
            damage(store, "large")
            return plan

        def resolve_tensor(self, read_item):
            return self.state_dict["large"][: 1 << 19]

    refused(store, reader, {"large": torch.zeros(1 << 20)}, planner=Half())


def test_damage_is_refused_where_the_state_has_another_dtype(later, store, reader):
    class Damaging(DefaultLoadPlanner):
        def create_local_plan(self):
            damage(store, "large")
            return super().create_local_plan()

    refused(store, reader, {"large": torch.zeros(1 << 20, dtype=torch.float64)}, planner=Damaging())


def test_a_planner_that_acts_on_each_tensor_is_not_given_a_damaged_one(later, store, reader):
    given = []

    class Acting(DefaultLoadPlanner):
        def create_local_plan(self):
            damage(store, "small")
            return super().create_local_plan()

        def commit_tensor(self, read_item, tensor):
            given.append(float(tensor.reshape(-1)[0]) if tensor.numel() else 0.0)

    refused(store, reader, state(9.0), planner=Acting())
    assert 666.0 not in given


def test_damage_to_what_is_not_wanted_harms_nobody(later, store, reader):
    class Damaging(DefaultLoadPlanner):
        def create_local_plan(self):
            damage(store, "large")
            return super().create_local_plan()

    into = {"small": torch.zeros(10)}
    dcp.load(into, checkpoint_id=store.version(2), storage_reader=reader, planner=Damaging())
    assert into["small"].tolist() == [3.0] * 10


def test_after_the_error_the_newest_is_the_version_before(later, store):
    for step in (1, 2):
        dcp.save(state(float(step)), checkpoint_id=store.version(step), storage_writer=store.writer)
    newest = store.latest()
    damage(store, "large")
    refused(store, store.reader, state(9.0))
    assert newest == store.version(2) and store.latest() == store.version(1)
    into = state(9.0)
    dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader)
    assert into["large"].unique().tolist() == [1.0]


def test_whole_versions_are_loaded_as_they_were_saved(store, reader):
    into = state(9.0)
    dcp.load(into, checkpoint_id=store.version(2), storage_reader=reader)
    assert all(torch.equal(into[name], value) for name, value in state(2.0).items() if name != "note")
    assert into["note"] == state(2.0)["note"]


def test_the_search_for_a_version_has_compared_the_digests_for_the_load_that_follows(store, reader, monkeypatch):
    taken = []
    monkeypatch.setattr(checked_copies, "_units", lambda reads, bad: taken.extend(reads) or [])
    into = state(9.0)
    dcp.load(into, checkpoint_id=store.version(2), storage_reader=reader)
    assert taken == []
    assert torch.equal(into["large"], state(2.0)["large"]) and torch.equal(into["turned"], state(2.0)["turned"])


def test_a_damaged_object_is_never_unpickled(store):
    dcp.save(state(1.0), checkpoint_id=store.version(1), storage_writer=store.writer)
    dcp.save(state(2.0), checkpoint_id=store.version(2), storage_writer=store.writer)
    assert store.latest() == store.version(2)
    damage(store, "all")
    refused(store, store.reader, state(9.0))
