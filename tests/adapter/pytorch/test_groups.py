"""Several stores of one process in one container: each group's versions are its own, by name and by content."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from mlflashpoint.adapter.pytorch import MemoryStorageReader, MemoryStore, ReadOnlyStore
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.node_versions import NodeLoader, split_version, version_of
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import CheckpointIdError, ContainerError, NoVersionError
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


@pytest.fixture
def make(base):
    made = []

    def store(group="default"):
        config = StoreConfig(job_id="job", base_container=base, deadline_s=30)
        made.append(MemoryStore(Runtime(config, rank=0, world_size=1, local_rank=0, group=group)))
        return made[-1]

    yield store
    for one in made:
        one.close()


def save(store, step, value):
    dcp.save({"w": torch.full((3,), value)}, checkpoint_id=store.version(step), storage_writer=store.writer)
    store.runtime.flush()


def load(reader, version):
    into = {"w": torch.zeros(3)}
    dcp.load(into, checkpoint_id=version, storage_reader=reader)
    return into["w"].unique().tolist()


def refused(run):
    with pytest.raises(CheckpointException) as caught:
        run()
    ((error, _),) = caught.value.failures.values()
    return error


def test_the_default_groups_version_lies_in_the_base_container(make, base):
    assert make().version(3) == f"{base}/step-3_ckpt"


def test_a_named_groups_version_lies_in_the_groups_folder(make, base):
    assert make("actor").version(3) == f"{base}/actor/step-3_ckpt"


def test_groups_of_one_step_each_get_their_own_back(make):
    stores = {group: make(group) for group in ("default", "actor", "critic")}
    for number, store in enumerate(stores.values()):
        save(store, 3, float(number))
    found = {group: store.latest() for group, store in stores.items()}
    assert found == {group: store.version(3) for group, store in stores.items()}
    assert [load(store.reader, found[group]) for group, store in stores.items()] == [[0.0], [1.0], [2.0]]


def test_another_process_names_a_groups_version_as_the_job_does(make, base):
    store = make("actor")
    save(store, 3, 7.0)
    reads = ReadOnlyStore(base, group="actor")
    assert reads.latest() == reads.version(3) == store.version(3)
    assert load(reads.reader, reads.latest()) == [7.0]
    assert load(MemoryStorageReader(checkpoint_loader=NodeLoader(group="actor")), store.version(3)) == [7.0]


def test_another_groups_version_is_refused_by_name(make):
    actor, critic = make("actor"), make("critic")
    save(actor, 3, 1.0)
    save(critic, 3, 2.0)
    error = refused(lambda: load(critic.reader, actor.version(3)))
    assert isinstance(error, CheckpointIdError)
    assert "'critic'" in str(error) and "remedy" in str(error)


def test_a_named_group_refuses_the_name_of_the_default_groups_version(make, base):
    with pytest.raises(CheckpointIdError, match=r"'actor'.*/actor/step-"):
        make("actor").writer.reset(f"{base}/step-3_ckpt")


def test_a_reader_of_the_default_group_is_told_which_group_a_version_is_of(make):
    store = make("actor")
    save(store, 3, 1.0)
    error = refused(lambda: load(MemoryStorageReader(), store.version(3)))
    assert isinstance(error, NoVersionError)
    assert "'actor'" in str(error) and "group" in str(error.remedy)


def test_a_store_never_makes_its_container_in_the_folder_of_a_group(make, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    default, actor = make(), make("actor")
    error = refused(
        lambda: dcp.save({"w": torch.ones(3)}, checkpoint_id=actor.version(3), storage_writer=default.writer)
    )
    assert isinstance(error, ContainerError)
    assert "'actor'" in str(error) and "group" in str(error.remedy)


@pytest.mark.parametrize("group", ["default", "actor", "a b", "seat-0"])
def test_the_name_of_a_version_says_its_container_and_step(group):
    base = CheckpointContainerId("/dev/shm/job")
    assert split_version(version_of(base, 7, group), group) == (base, 7)


def test_a_version_folder_that_a_framework_makes_first_is_no_foreign_file(base):
    (base / "actor" / "step-4_ckpt").mkdir(parents=True)
    (base / "step-4_ckpt").mkdir()
    config = StoreConfig(job_id="job", base_container=base)
    runtime = Runtime(config, rank=0, world_size=1, local_rank=0, group="actor")
    runtime.close()
    assert runtime.problem is None
