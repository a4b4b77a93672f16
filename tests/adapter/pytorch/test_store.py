"""One store per process, container and group: what a second one, and a closed one, may do."""

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from mlflashpoint.adapter.pytorch import MemoryStore
from mlflashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from mlflashpoint.core.seat import live_owner
from mlflashpoint.errors import StoreClosedError, StoreInUseError
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
RANKS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.fixture
def make(monkeypatch):
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    made = []
    with memory_folder() as folder:

        def store(**more):
            made.append(MemoryStore.from_env(**{"base_container": folder / "base", "job_id": "job", **more}))
            return made[-1]

        yield store
        for one in made:
            one.close()


def save(store, step):
    dcp.save({"w": torch.full((3,), float(step))}, checkpoint_id=store.version(step), storage_writer=store.writer)


def load(store):
    into = {"w": torch.zeros(3)}
    dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader)
    return into["w"].unique().tolist()


def of(caught):
    ((error, _),) = caught.value.failures.values()
    return error


def seat_of(store):
    return store.runtime.config.base_container / store.runtime.group / "seat-0"


def test_a_second_store_is_refused_at_once_with_a_remedy(make):
    make()
    began = time.monotonic()
    with pytest.raises(StoreInUseError, match=r"this process already has a store for it.*use that one, close it"):
        make()
    assert time.monotonic() - began < 5


def test_a_second_store_that_is_refused_leaves_the_first_as_it_was(make):
    store = make()
    save(store, 1)
    with pytest.raises(StoreInUseError):
        make()
    save(store, 2)
    assert load(store) == [2.0]
    pending = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=store.version(3), storage_writer=store.writer)
    pending.result()
    assert store.latest() == store.version(3)


def test_a_second_store_of_another_group_is_welcome(make):
    first, second = make(), make(group="other")
    save(first, 1)
    save(second, 2)
    assert (load(first), load(second)) == ([1.0], [2.0])


def test_after_a_close_another_store_goes_on_where_the_first_was(make):
    first = make()
    save(first, 1)
    first.close()
    second = make()
    assert load(second) == [1.0]
    save(second, 2)
    assert load(second) == [2.0]


def saved(make, *steps):
    store = make()
    for step in steps:
        save(store, step)
    store.runtime.flush()
    store.close()


def load_step(store, step):
    dcp.load({"w": torch.zeros(3)}, checkpoint_id=store.version(step), storage_reader=store.reader)


def test_a_load_of_an_older_version_at_a_start_takes_no_newer_one_away(make):
    saved(make, 1, 2)
    store = make()
    load_step(store, 1)
    assert load(store) == [2.0]
    store.close()
    assert load(make()) == [2.0]


@pytest.mark.parametrize(
    ("loads", "step", "origin"), [((1, 2), 3, 2), ((2, 1), 3, 2), ((1,), 3, 1), ((2, 1), 2, 1)], ids=str
)
def test_the_first_save_of_a_start_goes_on_from_the_newest_version_below_it_that_was_loaded(make, loads, step, origin):
    saved(make, 1, 2)
    store = make()
    for older in loads:
        load_step(store, older)
    with pytest.raises(CheckpointException):
        dcp.save({"w": object()}, checkpoint_id=store.version(step), storage_writer=store.writer)
    store.close()
    assert load(make()) == [float(origin)]


def test_a_closed_store_refuses_saves_and_takes_no_seat(make):
    store = make()
    save(store, 1)
    store.close()
    with pytest.raises(CheckpointException) as caught:
        save(store, 2)
    assert isinstance(of(caught), StoreClosedError) and isinstance(of(caught), ValueError)
    assert "is closed" in str(of(caught)) and "remedy" in str(of(caught))
    assert live_owner(seat_of(store)) is None


def test_a_closed_store_refuses_async_saves(make):
    store = make()
    store.close()
    pending = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=store.version(1), storage_writer=store.writer)
    with pytest.raises(CheckpointException) as caught:
        pending.result(60)
    assert isinstance(of(caught), StoreClosedError)


def test_a_closed_store_has_no_latest_version_to_give(make):
    store = make()
    save(store, 1)
    store.close()
    with pytest.raises(StoreClosedError):
        store.latest()
    assert live_owner(seat_of(store)) is None


def test_a_closed_store_saves_nothing_into_the_one_that_came_after_it(make):
    first = make()
    first.close()
    second = make()
    save(second, 1)
    with pytest.raises(CheckpointException) as caught:
        save(first, 2)
    assert isinstance(of(caught), StoreClosedError)
    assert second.latest() == second.version(1)


def test_a_closed_store_may_be_closed_again(make):
    store = make()
    store.close()
    store.close()


def test_other_managers_of_the_process_find_the_store_that_is_open(make):
    store = make()
    assert CheckpointObjectManager(job_id="job").runtime(store.base) is store.runtime
    store.close()
    assert CheckpointObjectManager(job_id="job").opened(store.base) is None
