"""Lazily conjugated and negated tensors are saved, staged and loaded into as DCP does it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mlflashpoint.adapter.pytorch.stager import ReusedStager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SIZES = (4, 1 << 20)


def conjugated(size, value=0):
    view = torch.full((size,), complex(value, value + 1), dtype=torch.complex64).conj()
    assert view.is_conj()
    return view


def negated(size, value=0):
    view = torch.full((size,), complex(value, value + 1), dtype=torch.complex64).conj().imag
    assert view.is_neg()
    return view


LAZY = [pytest.param(conjugated, id="conjugated"), pytest.param(negated, id="negated")]


def save(store, state, step=1):
    dcp.save(state, checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lazy", LAZY)
def test_a_load_into_a_lazy_view_gives_the_saved_values(store, lazy, size):
    saved = torch.arange(size).to(lazy(1).dtype)
    save(store, {"x": saved, "w": torch.ones(3)})
    into = {"x": lazy(size), "w": torch.zeros(3)}
    dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader)
    assert torch.equal(into["x"].resolve_conj().resolve_neg(), saved) and into["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lazy", LAZY)
def test_a_lazy_view_is_saved_with_its_values(store, lazy, size):
    saved = lazy(size, 5)
    save(store, {"x": saved})
    into = {"x": torch.zeros(size, dtype=saved.dtype)}
    dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader)
    assert torch.equal(into["x"], saved.resolve_conj().resolve_neg())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lazy", LAZY)
def test_a_lazy_view_is_staged_with_its_values(lazy, size):
    saved = lazy(size, 5)
    stager = ReusedStager()
    for _ in range(2):
        staged = stager.stage({"x": saved})["x"]
        assert torch.equal(staged.resolve_conj().resolve_neg(), saved.resolve_conj().resolve_neg())


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("lazy", LAZY)
def test_a_load_into_a_dtensor_whose_part_is_a_lazy_view_gives_the_saved_values(store, mesh, lazy):
    from torch.distributed.tensor import DTensor, Shard

    def of(local):
        return {"x": DTensor.from_local(local, mesh, [Shard(0)])}

    saved = torch.arange(6).to(lazy(1).dtype)
    save(store, of(saved))
    into = of(lazy(6))
    assert into["x"].to_local().is_conj() or into["x"].to_local().is_neg()
    dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader)
    assert torch.equal(into["x"].to_local().resolve_conj().resolve_neg(), saved)
