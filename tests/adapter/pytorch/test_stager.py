"""Staging for async saves: whole, unaliased, into memory that is reused only when nobody reads it."""

import copy
import gc

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from mlflashpoint.adapter.pytorch.stager import ReusedStager


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
