"""Tensors that are no strided block of memory are refused when they are saved, not when they are to be loaded."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.pytorch import MemoryStore
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import StateTypeError
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import memory_folder


@pytest.fixture
def store():
    with memory_folder() as folder:
        config = StoreConfig(job_id="job", base_container=folder / "base")
        found = MemoryStore(Runtime(config, rank=0, world_size=1, local_rank=0))
        yield found
        found.close()


@pytest.mark.parametrize("own_planner", [True, False])
@pytest.mark.parametrize(
    "odd", [torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr()], ids=lambda tensor: str(tensor.layout)
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_strides_is_refused_by_name_and_the_next_save_is_fine(store, odd, own_planner):
    def save(state, step):
        planner = store.planner if own_planner else None
        dcp.save(state, checkpoint_id=store.version(step), storage_writer=store.writer, planner=planner)

    save({"a": torch.ones(3)}, 1)
    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(3), "odd": odd}, 2)
    (error,) = (error for error, _ in caught.value.failures.values())
    assert isinstance(error, StateTypeError)
    assert "'odd'" in str(error) and str(odd.layout) in str(error) and "remedy" in str(error)
    assert store.latest() == store.version(1)
    save({"a": torch.ones(3)}, 3)
    into = {"a": torch.zeros(3)}
    dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader)
    assert torch.equal(into["a"], torch.ones(3))
    assert store.latest() == store.version(3)
