"""A version is replaced by newer saves while it is being loaded, by the same process."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from mlflashpoint.adapter.pytorch import MemoryStorageReader, ReadOnlyStore
from mlflashpoint.errors import NoVersionError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(step):
    return {"w": torch.full((1 << 19,), float(step)), "note": {"step": step, "text": str(step) * 3000}}


def save(store, step):
    dcp.save(state(step), checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)


def replacing(store):
    class Replacing(DefaultLoadPlanner):
        """Between the metadata and the data two saves overwrite both slots."""

        def create_local_plan(self):
            for step in (2, 3):
                save(store, step)
            store.runtime.flush()
            return super().create_local_plan()

    return Replacing()


@pytest.fixture(params=["found", "by name", "read only"])
def reader(store, request):
    """A reader of version 1, as its three kinds of user have it."""
    save(store, 1)
    if request.param == "found":
        assert store.latest() == store.version(1)
        return store.reader
    if request.param == "by name":
        store.runtime.flush()
        return MemoryStorageReader(store.version(1))
    return ReadOnlyStore(store.base).reader


def failure(caught):
    ((error, _),) = caught.value.failures.values()
    return error


def test_a_version_that_is_overwritten_between_metadata_and_data_is_refused(store, reader):
    into = state(9)
    with pytest.raises(CheckpointException) as caught:
        store.runtime.flush()
        dcp.load(into, checkpoint_id=store.version(1), storage_reader=reader, planner=replacing(store))
    error = failure(caught)
    assert isinstance(error, NoVersionError) and "overwritten" in str(error) and "newest" in error.remedy
    assert into["note"] == state(9)["note"], "objects of the other version were put into the state"


def test_a_version_that_is_overwritten_before_the_load_is_refused(store, reader):
    for step in (2, 3):
        save(store, step)
    store.runtime.flush()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state(9), checkpoint_id=store.version(1), storage_reader=reader)
    assert isinstance(failure(caught), NoVersionError)


def test_loads_beside_a_saving_thread_give_one_version_or_a_named_error(store):
    save(store, 1)
    reads, stop, broken = ReadOnlyStore(store.base), threading.Event(), []

    def keep_saving():
        try:
            step = 1
            while not stop.is_set():
                step += 1
                save(store, step)
        except BaseException as error:
            broken.append(error)

    store.runtime.flush()
    saving = threading.Thread(target=keep_saving)
    saving.start()
    good, kinds = [], set()
    try:
        for _ in range(25):
            into = state(0)
            try:
                dcp.load(into, checkpoint_id=reads.latest(), storage_reader=reads.reader)
            except CheckpointException as error:
                kinds |= {type(failure) for failure, _ in error.failures.values()}
                continue
            step = into["note"]["step"]
            assert into["note"] == state(step)["note"]
            assert into["w"].unique().tolist() == [step]
            good.append(step)
    finally:
        stop.set()
        saving.join(60)
    assert not broken
    assert good and kinds <= {NoVersionError}


def test_a_load_for_comparison_abandons_no_newer_version(store):
    for step in (1, 2):
        save(store, step)
        store.runtime.flush()
    into = state(0)
    dcp.load(into, storage_reader=MemoryStorageReader(store.version(1)))
    assert into["note"]["step"] == 1
    assert store.latest() == store.version(2)
