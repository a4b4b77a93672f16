"""Staging for async saves: whole, unaliased, into memory that is reused only when nobody reads it."""

import copy
import gc
import io
import threading

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from mlflashpoint.adapter.pytorch import StructureSavePlanner
from mlflashpoint.adapter.pytorch.missing import missing_of
from mlflashpoint.adapter.pytorch.stager import ReusedStager
from mlflashpoint.errors import FlashpointError


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 6, generator=g)
    return {
        "model": {"w": base, "t": base[:, 2], "p": torch.nn.Parameter(torch.randn(3, generator=g))},
        "kinds": [
            torch.tensor(seed),
            torch.empty(0, 3),
            torch.ones(5, dtype=torch.bool),
            torch.ones(3, dtype=torch.complex64),
            torch.randn(7, generator=g).bfloat16(),
            torch.randn(3, generator=g).to(torch.float8_e4m3fn),
        ],
        "notes": ["a", {"deep": [seed]}],
        "step": seed,
    }


def leaves(value):
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in leaves(entry)]
    if isinstance(value, list):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value]


def comparable(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.detach().contiguous().flatten().view(torch.uint8).tolist()
    return leaf


def same(one, other):
    return list(map(comparable, leaves(one))) == list(map(comparable, leaves(other)))


def storages(value):
    return {leaf.untyped_storage().data_ptr() for leaf in leaves(value) if isinstance(leaf, torch.Tensor)}


def test_it_is_what_dcp_takes_for_a_stager():
    assert isinstance(ReusedStager(), AsyncStager)


def test_a_staged_state_survives_every_change_of_the_original():
    stager, content = ReusedStager(), state(1)
    expected = copy.deepcopy(content)
    for _ in range(2):
        staged = stager.stage(content)
        with torch.no_grad():
            for leaf in leaves(content):
                if isinstance(leaf, torch.Tensor):
                    leaf.zero_()
        content["notes"][1]["deep"].append(9)
        assert same(staged, expected)
        del staged
        content = state(1)


def test_memory_is_reused_once_the_staged_state_is_gone():
    stager = ReusedStager()
    staged = stager.stage(state(1))
    before = storages(staged)
    del staged
    gc.collect()
    staged = stager.stage(state(2))
    assert storages(staged) == before
    assert same(staged, state(2))


def test_memory_in_use_is_left_alone():
    stager = ReusedStager()
    held = [stager.stage(state(seed)) for seed in range(4)]
    for seed, staged in enumerate(held):
        assert same(staged, state(seed))


def test_at_most_two_sets_of_buffers_are_kept():
    stager = ReusedStager()
    held = [stager.stage(state(seed)) for seed in range(5)]
    del held
    gc.collect()
    assert len(stager._sets) == 2
    stager.close()
    assert stager._sets == []


@pytest.mark.parametrize(
    "change",
    [lambda s: s["model"].update(w=torch.ones(9)), lambda s: s.update(new=torch.ones(2)), lambda s: s["kinds"].pop()],
    ids=["shape", "added", "removed"],
)
def test_a_changed_structure_is_staged_anew(change):
    stager = ReusedStager()
    stager.stage(state(1))
    content = state(2)
    change(content)
    expected = copy.deepcopy(content)
    assert same(stager.stage(content), expected)


def test_a_tensor_of_a_kind_of_its_own_is_left_to_dcp():
    class Marked(torch.Tensor):
        pass

    content = {"m": torch.randn(3).as_subclass(Marked)}
    expected = content["m"].clone()
    staged = ReusedStager().stage(content)
    content["m"].zero_()
    assert torch.equal(staged["m"], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_beside_a_nested_tensor_the_others_are_those_of_now():
    state = {"nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "w": torch.zeros(3)}
    staged = ReusedStager().stage(state)
    state["w"].fill_(9)
    assert staged["w"].tolist() == [0, 0, 0]
    assert staged["nested"].is_nested


class Uncopied(torch.Tensor):
    """A tensor whose values nothing gives away."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.detach, torch.Tensor.copy_, torch.Tensor.clone):
            raise RuntimeError("no copy")
        return super().__torch_function__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol):
        raise RuntimeError("no copy")


class Uncopyable:
    """An object that can be pickled and not deep-copied."""

    def __init__(self, value):
        self.value = value

    def __deepcopy__(self, memo):
        raise RuntimeError("no copy")


def refused(staged):
    planner = StructureSavePlanner()
    planner.set_up_planner(staged, is_coordinator=True)
    return str(missing_of(planner.create_local_plan()))


@pytest.mark.parametrize(
    "leaf",
    [
        lambda: torch.ones(3).as_subclass(Uncopied),
        lambda: (torch.ones(3), threading.Lock()),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["tensor", "object with a tensor", "tensor without data"],
)
def test_what_cant_be_copied_is_refused_and_never_the_callers_own(leaf):
    content = {"a": {"own": leaf()}, "w": torch.ones(2)}
    stager = ReusedStager()
    for _ in range(2):
        staged = stager.stage(content)
        assert staged["a"]["own"] is not content["a"]["own"]
        assert "'a.own' is a" in refused(staged)
        assert staged["w"].tolist() == [1, 1]
        del staged


def test_a_tensor_that_dcp_cant_stage_is_copied_though_training_goes_on():
    weights = torch.eye(3, requires_grad=True)
    live = (weights * 2).to_sparse()
    staged = ReusedStager().stage({"sparse": live, "pair": (weights * 2, 1), "lock": Uncopyable(weights)})
    with torch.no_grad():
        live._values().zero_()
        weights.zero_()
    assert torch.equal(staged["sparse"].to_dense(), 2 * torch.eye(3))
    assert torch.equal(staged["pair"][0].detach(), 2 * torch.eye(3))
    assert torch.equal(staged["lock"].value.detach(), torch.eye(3))


def test_a_tensor_that_turns_sparse_is_staged_anew():
    stager = ReusedStager()
    stager.stage({"w": torch.eye(3)})
    assert stager.stage({"w": torch.eye(3).to_sparse()})["w"].is_sparse


def test_without_memory_for_the_copy_the_save_is_refused(monkeypatch):
    def empty(*args, **kwargs):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(torch, "empty", empty)
    staged = ReusedStager().stage({"w": torch.ones(2)})
    monkeypatch.undo()
    assert "no memory" in refused(staged)


def test_what_is_refused_cant_be_pickled_by_a_planner_of_ones_own():
    staged = ReusedStager().stage({"lock": threading.Lock()})
    with pytest.raises(FlashpointError, match="lock"):
        torch.save(staged["lock"], io.BytesIO())


def test_a_state_that_contains_itself_is_refused_by_the_place_where_it_does():
    content = {"w": torch.ones(2), "odd": {"list": [torch.ones(1)]}}
    content["odd"]["list"].append(content["odd"])
    why = refused(ReusedStager().stage(content))
    assert "'state' can't be staged: it.odd.list[1]: the state contains itself" in why
    assert "remedy: store it flatter" in why


def test_an_object_that_nests_too_deep_to_be_copied_is_refused_by_its_key():
    deep = ()
    for _ in range(20_000):
        deep = (deep,)
    content = {"a": {"own": deep}, "w": torch.ones(2)}
    staged = ReusedStager().stage(content)
    assert "'a.own' can't be copied" in (why := refused(staged)) and "nested too deep, 20000 levels" in why
    assert staged["w"].tolist() == [1, 1]
