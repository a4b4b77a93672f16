import argparse
import collections
import dataclasses
import enum
import io
import pathlib
import re
import struct
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.core.dtypes import DTYPES
from mlflashpoint.core.layout import Layout
from mlflashpoint.core.shard import digest_of, parse_index
from mlflashpoint.core.skeleton import dumps, parse_nodes
from mlflashpoint.core.state import flatten, register_leaf, unflatten
from mlflashpoint.errors import ShardFormatError, StateTypeError
from tests.core.shard_helpers import differences

Point = collections.namedtuple("Point", "x y")


def through_json(state):
    """The state after its skeleton went through text, as it does on its way through a file."""
    flat = flatten(state)
    layout = Layout(flat)
    digests = [digest_of(b"")] * len(layout.entries)
    text = layout.template.render(flat.skeleton.values, digests, dumps([["dict", []]]))
    index = parse_index(text, layout.nbytes)
    return unflatten(index.skeleton, [tensor.clone() for tensor in flat.tensors])


def assert_same(state):
    assert differences(through_json(state), state) == []


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            2**63 - 1,
            -(2**63),
            2**63,
            -(2**63) - 1,
            3**20000,
            "",
            "ä\ud800\x00\u2028",
            b"",
            b"\x00\xff",
        ),
        *(0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan"), -float("nan")),
        *(
            complex(float("nan"), -0.0),
            1j,
            torch.bfloat16,
            torch.device("cuda", 3),
            torch.Size([2, 0]),
            torch.sparse_csr,
        ),
        *(
            "ä" * 5000 + "\ud800",
            torch.channels_last,
            [],
            (),
            {},
            set(),
            frozenset(),
            {1, 2.5, "x"},
            frozenset({(1, None)}),
            b"x" * 10_000,
        ),
        *(bytearray(), bytearray(b"ab"), collections.OrderedDict(b=1, a=2), pathlib.PosixPath("/a/b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_plain_value_comes_back_as_it_was(value):
    assert_same({"value": value, "list": [value, (value,)]})


def test_a_nan_keeps_its_payload():
    (odd,) = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))
    assert_same([odd])


@pytest.mark.parametrize("state", [7, "text", torch.arange(3), (torch.ones(2), 1), [], None, b"y" * 5000])
def test_a_state_need_not_be_a_dictionary(state):
    assert_same(state)


def test_dictionaries_keep_their_order_and_the_kinds_of_their_keys():
    keys = ["b", "a", 1, -7, 2.5, None, b"k", (1, "x", (None, 2.0)), torch.float16, True and 10, 2**70]
    state = {key: torch.full((2,), float(place)) for place, key in enumerate(keys)}
    loaded = through_json(state)
    assert list(map(type, loaded)) == list(map(type, keys))
    assert differences(loaded, state) == []


def test_keys_that_python_calls_equal_are_told_apart():
    forms = [flatten({key: torch.ones(1)}).form for key in (1, True, 1.0)]
    for form in forms:
        for key in (1, True, 1.0):
            again = flatten({key: torch.ones(1)}, like=form)
            assert type(again.form.keys[0]) is type(key)


def test_a_named_tuple_keeps_its_fields_and_a_registered_one_its_class():
    loaded = through_json({"p": Point(torch.ones(2), 3)})
    assert type(loaded["p"]).__name__ == "Point" and loaded["p"].y == 3 and torch.equal(loaded["p"].x, torch.ones(2))
    register_leaf("test.Point", Point, tuple, lambda state: Point(*state))
    assert type(through_json([Point(1, 2)])[0]) is Point


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Counters:
    seen: int
    table: torch.Tensor


def test_registered_types_come_back_with_their_tensors():
    register_leaf("test.Color", Color, int, Color)
    register_leaf("test.Counters", Counters, lambda c: vars(c), lambda s: Counters(**s))
    loaded = through_json({"c": Color.RED, "n": Counters(3, torch.arange(4))})
    assert loaded["c"] is Color.RED
    assert loaded["n"].seen == 3 and torch.equal(loaded["n"].table, torch.arange(4))


def test_a_name_of_the_allow_list_stands_for_one_class():
    class Other:
        pass

    register_leaf("test.Once", Other, vars, lambda s: Other())
    with pytest.raises(StateTypeError, match=r"test\.Once"):
        register_leaf("test.Once", pathlib.PurePath, str, str)
    with pytest.raises(StateTypeError, match=r"test\.Once"):
        register_leaf("test.Twice", Other, vars, lambda s: Other())


def test_an_unregistered_leaf_is_refused_when_loading():
    skeleton = parse_nodes([["leaf", "test.nobody"], None], 0)
    with pytest.raises(ShardFormatError, match=r"test\.nobody.*register_leaf"):
        unflatten(skeleton, [])


def test_a_leaf_that_can_not_be_decoded_is_a_format_error():
    class Picky:
        pass

    register_leaf("test.Picky", Picky, lambda picky: None, lambda state: 1 / 0)
    with pytest.raises(ShardFormatError, match="ZeroDivisionError"):
        unflatten(parse_nodes([["leaf", "test.Picky"], None], 0), [])


def test_common_containers_of_python_come_back():
    stream = io.BytesIO(b"0123456789")
    stream.seek(4)
    state = {
        "d": collections.defaultdict(list, a=[1]),
        "n": types.SimpleNamespace(a=torch.ones(2)),
        "args": argparse.Namespace(lr=0.1, name=None),
        "io": stream,
    }
    loaded = through_json(state)
    assert loaded["d"]["new"] == [] and loaded["d"]["a"] == [1]
    assert torch.equal(loaded["n"].a, torch.ones(2))
    assert vars(loaded["args"]) == vars(state["args"])
    assert loaded["io"].read() == b"456789"


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6, dtype=np.int32).reshape(2, 3), np.float32([[1.5, np.nan]]), np.zeros((0, 3)), np.array(5)),
        *(
            np.array(["a", "bc"]),
            np.array([b"x"]),
            np.array([True]),
            np.array(["2020-01-01"], "M8[D]"),
            np.arange(3)[::-1],
        ),
        *(np.arange(6, dtype=">i4"), np.asfortranarray(np.ones((2, 3))), np.array([1 + 2j])),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_numpy_arrays_come_back(array):
    loaded = through_json({"a": array})["a"]
    assert loaded.dtype == array.dtype and loaded.shape == array.shape
    assert loaded.tobytes() == np.ascontiguousarray(array).tobytes()
    assert loaded.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.float64("nan"), np.int64(7), np.bool_(True), np.uint8(3), np.str_("x"), np.longdouble(2)],
)
def test_numpy_scalars_keep_their_type(scalar):
    loaded = through_json([scalar])[0]
    assert type(loaded) is type(scalar) and (loaded == scalar or (scalar != scalar and loaded != loaded))


def test_the_states_of_numpys_and_torchs_generators_come_back():
    state = {"numpy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}
    loaded = through_json(state)
    again = np.random.RandomState()
    again.set_state(loaded["numpy"])
    assert again.rand() == np.random.RandomState(3).rand()
    assert torch.equal(loaded["torch"], state["torch"])


@pytest.mark.parametrize("bad", [np.array([object()], dtype=object), np.zeros(2, dtype=[("a", "i4")])])
def test_numpy_objects_and_records_are_refused(bad):
    with pytest.raises(StateTypeError, match=r"state\.a"):
        flatten({"a": bad})


def example(dtype, shape=(3, 4)):
    raw = torch.arange(1, 1 + 16 * 12, dtype=torch.int64).to(torch.uint8)[: 12 * dtype.itemsize]
    return (raw % 2).bool().reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_come_back(name):
    dtype = DTYPES[name]
    tensor = example(dtype)
    assert_same({"plain": tensor, "t": tensor.t(), "row": tensor[1], "zero_dim": tensor[1, 2], "none": tensor[0:0]})


def test_every_floating_and_integer_dtype_of_torch_is_stored():
    whole = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and (d.is_floating_point or d.is_complex)}
    assert whole <= set(DTYPES.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[:, 1:3],
        lambda base: base[::2, ::2],
        lambda base: base[0].expand(5, 8),
        lambda base: base.reshape(2, 4, 2, 4).permute(3, 1, 0, 2),
        lambda base: torch.complex(base, base).conj(),
        lambda base: torch.complex(base, base).conj().imag,
        lambda base: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda base: base.as_strided((3, 3), (1, 1)),
        lambda base: base[0, 0],
        lambda base: base[3:3],
        lambda base: torch.empty(0, 5),
        lambda base: base.clone().requires_grad_(),
        lambda base: base.clone().requires_grad_() * 2,
        lambda base: base.flip(0)[:, 0],
    ],
)
def test_tensors_of_every_layout_come_back(make):
    assert_same({"x": make(torch.randn(8, 8))})


def test_a_dense_tensor_keeps_its_stride():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert through_json([image])[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_sparse_tensors_come_back(layout):
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 5] = 1.5, -2.0
    kind = getattr(torch, layout)
    sparse = dense.to_sparse(layout=kind, blocksize=(2, 2) if "bs" in layout else None)
    assert_same({"s": sparse})
    assert through_json([sparse])[0].layout is kind


def test_uncoalesced_and_hybrid_sparse_tensors_come_back():
    indices = torch.tensor([[0, 0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 2), (4, 2), requires_grad=True)
    loaded = through_json([sparse])[0]
    assert not loaded.is_coalesced() and loaded.requires_grad
    assert torch.equal(loaded.to_dense(), sparse.to_dense())


def test_parameters_stay_parameters_and_tied_ones_stay_tied():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    state = {
        "a": weight,
        "b": weight,
        "bare": weight.detach(),
        "t": weight.detach().t(),
        "row": weight.detach()[0],
        "f": frozen,
    }
    flat = flatten(state)
    assert flat.names() == ["a", "t", "row", "f"]
    loaded = through_json(state)
    assert differences(loaded, state) == []
    assert loaded["a"] is loaded["b"] and loaded["a"].data_ptr() == loaded["bare"].data_ptr()
    with torch.no_grad():
        loaded["a"].fill_(1)
    assert torch.equal(loaded["bare"], torch.ones(4, 4))


def test_tensors_that_share_memory_in_another_shape_or_conjugate_are_stored_apart():
    base = torch.randn(4, 4, dtype=torch.complex64)
    state = {
        "x": base,
        "t": base.t(),
        "conj": base.conj(),
        "flat": base.view(16),
        "row": base[0],
        "bits": base.view(torch.float32),
    }
    assert len(flatten(state).tensors) == 6
    assert_same(state)


def test_tensors_without_elements_are_never_tied():
    state = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 3)}
    assert len(flatten(state).tensors) == 3
    assert_same(state)


def test_a_tie_that_comes_or_goes_is_noticed_against_an_earlier_form():
    x = torch.randn(3, 3)
    tied, turned, apart = {"a": x, "b": x}, {"a": x, "b": x.t()}, {"a": x, "b": x.clone()}
    for first in (tied, turned, apart):
        form = flatten(first).form
        for second in (tied, turned, apart):
            flat = flatten(second, like=form)
            assert len(flat.tensors) == len(flatten(second).tensors)
            assert differences(unflatten(flat.skeleton, flat.tensors), second) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4, 4), torch.zeros(4, 4).t()),
        (torch.zeros(4, 4).t(), torch.zeros(8, 4)[::2].t()),
        (torch.zeros(4), torch.zeros(4, requires_grad=True)),
        (torch.zeros(4), torch.nn.Parameter(torch.zeros(4))),
        (torch.zeros(4), None),
        (torch.zeros(4), [torch.zeros(4)]),
    ],
)
def test_another_form_is_never_taken_for_the_earlier_one(first, second):
    form = flatten({"a": first}).form
    flat = flatten({"a": second}, like=form)
    assert flat.form is not form
    assert differences(unflatten(flat.skeleton, flat.tensors), {"a": second}) == []


def test_an_equal_form_is_recognised_with_other_values_and_other_memory():
    form = flatten({"a": torch.zeros(3), "step": 1}).form
    flat = flatten({"a": torch.ones(3), "step": 2}, like=form)
    assert flat.form is form
    assert differences(unflatten(flat.skeleton, flat.tensors), {"a": torch.ones(3), "step": 2}) == []


def test_a_tensor_changed_in_place_to_another_shape_is_another_form():
    tensor = torch.arange(6.0).reshape(2, 3)
    form = flatten([tensor]).form
    tensor.data = tensor.data.view(3, 2)
    assert flatten([tensor], like=form).form is not form
    form = flatten([tensor]).form
    tensor.t_()
    assert flatten([tensor], like=form).form is not form


def test_the_skeleton_is_a_snapshot():
    state = {"steps": [1, 2], "raw": bytearray(b"ab"), "set": {1}, "args": types.SimpleNamespace(a=1)}
    flat = flatten(state)
    state["steps"].append(3)
    state["raw"][0] = 0
    state["set"].add(9)
    state["args"].a = 2
    loaded = unflatten(flat.skeleton, flat.tensors)
    assert loaded["steps"] == [1, 2] and loaded["raw"] == b"ab" and loaded["set"] == {1} and loaded["args"].a == 1


class Tagged(torch.Tensor):
    pass


class Opaque:
    pass


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Opaque(), "Opaque.*register_leaf"),
        (Color, "register_leaf"),
        (lambda: None, "function.*register_leaf"),
        (torch.randn(2).as_subclass(Tagged), "Tagged.*register_leaf"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quint8.*int_repr"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.int4), "int4"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "components"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "register_leaf"),
        (torch.nn.parameter.UninitializedParameter(), "register_leaf"),
        (torch.ones(2, 2).to_mkldnn(), "mkldnn"),
        (collections.defaultdict(lambda: 0), "defaultdict"),
        (torch.return_types.max((torch.ones(1), torch.zeros(1))), "register_leaf"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_can_not_be_stored_is_refused_by_its_place(bad, why):
    with pytest.raises(StateTypeError, match=r"state\.model\[1\]\['a b'\]\.x|state\.model\[1\]\.a b\.x") as caught:
        through_json({"ok": torch.ones(2), "model": [1, {"a b": {"y": 1, "x": bad}}]})
    assert re.search(why, str(caught.value))


def test_a_cycle_is_refused():
    state = {"a": [1]}
    state["a"].append({"back": state})
    with pytest.raises(StateTypeError, match=r"state\.a\[1\]\.back: the state contains itself"):
        flatten(state)


def test_one_container_in_two_places_is_no_cycle():
    shared = [torch.ones(2)]
    assert_same({"a": shared, "b": shared, "c": (shared, shared)})


def test_deep_nesting_comes_back_and_beyond_a_limit_is_refused():
    state = torch.ones(1)
    for depth in range(900):
        state = [state] if depth % 2 else {"k": state}
    loaded = through_json(state)
    for _ in range(900):
        loaded = next(iter(loaded.values())) if isinstance(loaded, dict) else loaded[0]
    assert torch.equal(loaded, torch.ones(1))
    for _ in range(200):
        state = [state]
    with pytest.raises(StateTypeError, match="deep"):
        flatten(state)


def test_a_leaf_that_unfolds_for_ever_is_refused():
    class Russian:
        pass

    register_leaf("test.Russian", Russian, lambda doll: Russian(), lambda state: None)
    with pytest.raises(StateTypeError, match="deep"):
        flatten([Russian()])


def test_what_an_encoder_raises_is_named_with_its_place():
    class Broken:
        pass

    register_leaf("test.Broken", Broken, lambda broken: broken.missing, lambda state: None)
    with pytest.raises(StateTypeError, match=r"state\.x: leaf 'test\.Broken'.*AttributeError"):
        flatten({"x": Broken()})


def test_names_are_unique_where_places_read_the_same():
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}, "a.b~2": torch.ones(3)}
    assert flatten(state).names() == ["a.b", "a.b~3", "a.b~2"]


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
)
keys = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.binary(max_size=3)
)
tensors = st.builds(
    lambda shape, name: torch.zeros(shape).to(DTYPES[name]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64"]),
)
states = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Point, inner, inner).map(tuple)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(states)
def test_any_nested_state_comes_back(state):
    assert_same(state)
