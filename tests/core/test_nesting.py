"""What nests too deep, or contains itself, is told by its place."""

import json

import pytest
import torch

from mlflashpoint.adapter.lightning.local_shards import _localized
from mlflashpoint.adapter.megatron_local.leaves import with_devices
from mlflashpoint.core.nesting import too_deep
from mlflashpoint.core.plain import decode_plain, encode_plain
from mlflashpoint.core.state import flatten, unflatten
from mlflashpoint.errors import StateTypeError


def chain(depth, inner=None):
    for level in range(depth):
        inner = [inner] if level % 2 else {"k": inner}
    return inner


def test_the_deepest_place_is_named_by_its_beginning_and_its_depth():
    error = too_deep({"shallow": [1, [2]], "deep": {"a": chain(5000, torch.ones(1))}})
    assert str(error).startswith("state.deep.a[0].k... (5001 parts): the state is nested too deep, 5001 levels there")
    assert "remedy: store it flatter" in str(error)


def test_a_state_that_contains_itself_is_named_where_it_does():
    state = {"ok": [1], "odd": {"list": [0]}}
    state["odd"]["list"].append(state["odd"])
    assert str(too_deep(state)).startswith("state.odd.list[1]: the state contains itself")


def test_what_is_held_in_many_places_is_looked_at_once():
    shared = [1]
    for _ in range(200):
        shared = [shared, shared]
    assert "200 levels" in str(too_deep(shared))


def test_a_long_key_is_cut():
    assert len(too_deep({"k" * 10_000: {}}).message) < 200


@pytest.mark.parametrize("depth", [9, 5000])
def test_a_key_of_tuples_that_could_not_be_read_again_is_refused_by_its_place(depth):
    key = ()
    for _ in range(depth):
        key = (key,)
    with pytest.raises(StateTypeError, match=r"state\.a\[.*the key: tuples nested more than 8 deep"):
        flatten({"a": {key: 1}})


@pytest.mark.parametrize("inner", ["x", 1 << 70, b"x", torch.Size([1])])
def test_a_key_of_tuples_that_is_just_not_too_deep_can_be_read_again(inner):
    key = inner
    for _ in range(8):
        key = (key,)
    assert decode_plain(json.loads(json.dumps(encode_plain(key)))) == key


def test_the_place_of_what_is_nested_too_deep_leaves_room_for_what_is_wrong():
    with pytest.raises(StateTypeError) as told:
        flatten({"model": chain(2000, torch.ones(1))})
    assert len(str(told.value)) < 400
    assert str(told.value).startswith("state.model[0].k")
    assert "nested more than 1000 deep" in str(told.value) and "remedy" in str(told.value)


def test_a_key_that_is_too_deep_is_named_in_a_save_after_a_good_one():
    form = flatten({"a": {(1,): 1}}).form
    key = ()
    for _ in range(5000):
        key = (key,)
    with pytest.raises(StateTypeError, match="the key: tuples nested"):
        flatten({"a": {key: 1}}, like=form)


def test_an_encoder_that_meets_the_recursion_limit_is_told_with_a_remedy():
    from types import SimpleNamespace

    from mlflashpoint.core.leaves import register_leaf

    class Deep(SimpleNamespace):
        pass

    def encode(value):
        return encode(value)

    register_leaf("test.Deep", Deep, encode, lambda state: Deep())
    with pytest.raises(StateTypeError, match=r"state\.x: leaf 'test\.Deep'.*RecursionError.*remedy: store it flatter"):
        flatten({"x": Deep()})


def test_what_is_nested_as_deep_as_allowed_comes_back():
    flat = flatten(chain(900, torch.ones(1)))
    assert isinstance(unflatten(flat.skeleton, flat.tensors), list)


@pytest.mark.parametrize(
    ("walk", "place"),
    [
        (with_devices, r"state\.k\[0\]\.k"),
        (lambda value: _localized({"state": value}), "the optimizer's state: .k"),
    ],
    ids=["Megatron's local state", "Lightning's optimizer state"],
)
def test_what_adapters_walk_themselves_is_told_by_its_place(walk, place):
    with pytest.raises(StateTypeError, match=place):
        walk({"k": chain(5000, 1)} if "optimizer" not in place else keyed(5000))


def keyed(depth):
    inner = 1
    for _ in range(depth):
        inner = {"k": inner}
    return inner
