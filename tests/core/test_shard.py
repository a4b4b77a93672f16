import copy
import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.core import shard
from mlflashpoint.core.arena import Arena, file_of
from mlflashpoint.core.layout import Layout
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.saver import ShardSaver
from mlflashpoint.core.shard import digest_of, is_dense, parse_index
from mlflashpoint.core.state import flatten
from mlflashpoint.errors import FlashpointError, ShardFormatError
from tests.core.shard_helpers import FIELDS

GOLDEN_STATE = {
    "model": {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), 7: torch.tensor([1, 2, 3], dtype=torch.uint8)},
    "tied": None,
    "rest": [1, -0.0, "ä", (True, float("inf")), torch.zeros(0, 2), torch.nn.Parameter(torch.ones(1))],
}
GOLDEN_STATE["tied"] = GOLDEN_STATE["model"]["w"]
GOLDEN_INDEX = (
    b'{"attributes":[["dict",["loop"]],5],"data_bytes":132,"format_version":1,"skeleton":['
    b'["dict",["model","tied","rest"]],["dict",["w",7]],["tensor",0],["tensor",1],["tensor",0],'
    b'["list",6],1,-0.0,"\\u00e4",["tuple",2],true,["float","7ff0000000000000"],["tensor",2],["parameter",3]],'
    b'"tensors":[["model.w","float32",[2,2],0,16,"2babafcad3709c7ce3b3073547aa9dc3",[1,2]],'
    b'["model[7]","uint8",[3],64,3,"ac77eb88cbc4b8d4ebce9b7632ae733b"],'
    b'["rest[4]","float32",[0,2],0,0,"99aa06d3014798d86001c324468d497f"],'
    b'["rest[5]","float32",[1],128,4,"e6f9acca6893caeb591ef4e963e120d4"]]}'
)
GOLDEN_DATA = {0: "0000803f000000400000404000008040", 64: "010203", 128: "0000803f"}
GOLDEN_RECORD = (
    b'{"created_s":1.5,"data_bytes":132,"format_version":1,"group":"default","incarnation":1,"index_bytes":%d,'
    b'"index_digest":"%s","job_id":"job","rank":0,"resumed_from":-1,"run":"","step":3,"topology":"","world_size":1}'
)


def test_the_format_is_what_it_was(seat):
    arena = Arena(seat)
    saver = ShardSaver()
    arena.reserve(1, 1)
    saver.commit(saver.stage(arena.slots[0], GOLDEN_STATE, attributes={"loop": 5}), step=3, created_s=1.5, **FIELDS)
    slot = arena.slots[0].path
    assert file_of(slot, "index").read_bytes() == GOLDEN_INDEX
    digest = digest_of(GOLDEN_INDEX).encode()
    record = GOLDEN_RECORD % (len(GOLDEN_INDEX), digest)
    sealed = record.replace(
        b',"format', b',"digest":"%s","format' % hashlib.blake2b(record, digest_size=16).hexdigest().encode(), 1
    )
    assert file_of(slot, "commit").read_bytes() == sealed
    data = file_of(slot, "data").read_bytes()
    for offset, content in GOLDEN_DATA.items():
        assert data[offset : offset + len(content) // 2].hex() == content


def test_a_shard_of_the_golden_bytes_loads():
    data = bytearray(132)
    for offset, content in GOLDEN_DATA.items():
        data[offset : offset + len(content) // 2] = bytes.fromhex(content)
    reader = reader_of(GOLDEN_INDEX, bytes(data))
    reader.verify()
    state = reader.state()
    assert torch.equal(state["model"]["w"], GOLDEN_STATE["model"]["w"]) and state["tied"] is state["model"]["w"]
    assert state["rest"][3] == (True, float("inf"))


def reader_of(index, data):
    record = ShardRecord(
        step=1,
        topology="",
        index_bytes=len(index),
        index_digest=digest_of(index),
        data_bytes=len(data),
        created_s=0.0,
        **FIELDS,
    )
    return ShardReader.from_buffers(record, index, data)


def changed(**parts):
    raw = json.loads(GOLDEN_INDEX)
    raw.update(parts)
    return json.dumps(raw).encode()


def row(**parts):
    """The golden index with its first row changed."""
    table = json.loads(GOLDEN_INDEX)["tensors"]
    names = ["name", "dtype", "shape", "offset", "nbytes", "digest", "stride"]
    first = {**dict(zip(names, table[0], strict=True)), **parts}
    return changed(tensors=[[first[name] for name in names], *table[1:]])


MALFORMED = {
    "empty": b"",
    "no_json": b"\x80\x04\x95pickle",
    "no_utf8": b'{"a":"\xff"}',
    "deep": b"[" * 100_000,
    "nan": GOLDEN_INDEX.replace(b"-0.0", b"NaN"),
    "a_number_too_long": GOLDEN_INDEX.replace(b"-0.0", b"9" * 5000),
    "list": b"[]",
    "missing_field": json.dumps({"tensors": []}).encode(),
    "extra_field": changed(more=1),
    "version": changed(format_version=2),
    "version_true": changed(format_version=[1]),
    "data_bytes": changed(data_bytes=131),
    "table_no_list": changed(tensors={}),
    "row_no_list": changed(tensors=["x"]),
    "row_short": changed(tensors=[["w", "float32", [1], 0, 4]]),
    "name_number": row(name=1),
    "name_twice": row(name="rest[5]"),
    "digest_short": row(digest="ab"),
    "digest_upper": row(digest="A" * 32),
    "dtype_unknown": row(dtype="float33"),
    "dtype_list": row(dtype=["float32"]),
    "shape_negative": row(shape=[-2, -2]),
    "shape_float": row(shape=[2.0, 2]),
    "shape_bool": row(shape=[True, 4]),
    "shape_huge": row(shape=[2**62, 2**62, 0], nbytes=0, stride=[1, 2]),
    "shape_many": row(shape=[1] * 65 + [4]),
    "length_wrong": row(nbytes=15),
    "offset_negative": row(offset=-16),
    "offset_beyond": row(offset=120),
    "offset_far_beyond": row(offset=2**63),
    "offset_unaligned": row(offset=2),
    "offset_bool": row(offset=False),
    "overlap": row(offset=56),
    "stride_overlapping": row(stride=[1, 1]),
    "stride_gap": row(stride=[1, 4]),
    "stride_zero": row(stride=[0, 1]),
    "stride_short": row(stride=[1]),
    "skeleton_no_list": changed(skeleton={}),
    "skeleton_empty": changed(skeleton=[]),
    "skeleton_short": changed(skeleton=[["list", 2], 1]),
    "skeleton_long": changed(skeleton=[["list", 1], 1, 2]),
    "skeleton_object": changed(skeleton=[{"a": 1}]),
    "ref_beyond": changed(skeleton=[["tensor", 4]]),
    "ref_negative": changed(skeleton=[["tensor", -1]]),
    "ref_bool": changed(skeleton=[["tensor", True]]),
    "ref_grad": changed(skeleton=[["tensor", 0, 2]]),
    "list_negative": changed(skeleton=[["list", -1]]),
    "list_keys": changed(skeleton=[["list", ["a"]], 1]),
    "dict_number": changed(skeleton=[["dict", 1], 1]),
    "key_twice": changed(skeleton=[["dict", ["a", "a"]], 1, 2]),
    "key_object": changed(skeleton=[["dict", [{"a": 1}]], 1]),
    "named_code": changed(skeleton=[["named", "x", ["a=__import__('os')"]], 1]),
    "named_keyword": changed(skeleton=[["named", "x", ["class"]], 1]),
    "named_twice": changed(skeleton=[["named", "x", ["a", "a"]], 1, 2]),
    "unknown_tag": changed(skeleton=[["pickle", "gASVBQ=="]]),
    "unknown_dtype": changed(skeleton=[["dtype", "nn"]]),
    "unknown_device": changed(skeleton=[["device", "nowhere:0"]]),
    "base64": changed(skeleton=[["bytes", "*"]]),
    "float_short": changed(skeleton=[["float", "00"]]),
    "int_text": changed(skeleton=[["int", "0xzz"]]),
    "size_negative": changed(skeleton=[["size", [-1]]]),
    "attributes_tensor": changed(attributes=[["tensor", 0]]),
    "attributes_empty": changed(attributes=[]),
}


@pytest.mark.parametrize("index", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_index_is_a_named_error(index):
    with pytest.raises(ShardFormatError):
        parse_index(index, 132)


def test_an_index_beyond_the_size_limit_is_not_even_parsed(monkeypatch):
    monkeypatch.setattr(shard, "MAX_INDEX_BYTES", 10)
    monkeypatch.setattr(shard.json, "loads", None)
    with pytest.raises(ShardFormatError, match="exceeds 10"):
        parse_index(GOLDEN_INDEX, 132)


@pytest.mark.parametrize("skeleton", [[["tensor", 1, 1]], [["parameter", 1, 1]], [["set", 1], ["list", 0]]])
def test_a_skeleton_that_asks_for_the_impossible_is_a_named_error(skeleton):
    with pytest.raises(ShardFormatError):
        reader_of(changed(skeleton=skeleton), bytes(132)).state()


@pytest.mark.parametrize("leaf", ["numpy.ndarray", "numpy.float32", "bytes", "str", "io.BytesIO", "torch.sparse_coo"])
@pytest.mark.parametrize("child", [["dict", []], ["tensor", 0], 7])
def test_a_leaf_over_another_state_is_a_named_error(leaf, child):
    with pytest.raises(ShardFormatError, match=leaf):
        reader_of(changed(skeleton=[["leaf", leaf], child]), bytes(132)).state()


def test_numpy_objects_can_not_be_asked_for():
    body = [["dict", ["dtype", "shape", "data"]], "|O", ["list", 1], 1, ["tensor", 1]]
    with pytest.raises(ShardFormatError, match="numpy"):
        reader_of(changed(skeleton=[["leaf", "numpy.ndarray"], *body]), bytes(132)).state()


def use(index, data=bytes(132)):
    """Load whatever the index describes; only errors of ours may come out."""
    try:
        reader = reader_of(index, data)
        for entry in reader.index.tensors:
            assert entry.offset >= 0 and entry.offset + entry.nbytes <= len(data)
        reader.state()
        reader.attributes  # noqa: B018
        reader.verify()
    except FlashpointError:
        pass


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-4, 140)
    | st.sampled_from([2**31, 2**62, 2**63, -(2**63), 2**64])
    | st.floats()
    | st.sampled_from(["float32", "dict", "list", "tensor", "parameter", "leaf", "named", "bytes", "key", "int", "a"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def places(node, at=()):
    yield at
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*at, key))


PLACES = [place for place in places(json.loads(GOLDEN_INDEX)) if place]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), values), min_size=1, max_size=3))
def test_an_index_changed_anywhere_loads_or_is_a_named_error(changes):
    raw = json.loads(GOLDEN_INDEX)
    for place, value in changes:
        try:
            parent = raw
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue
    use(json.dumps(raw).encode())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOLDEN_INDEX) - 1), st.binary(max_size=4), st.integers(0, 8))
def test_bytes_changed_anywhere_load_or_are_a_named_error(at, patch, drop):
    use(GOLDEN_INDEX[:at] + patch + GOLDEN_INDEX[at + drop :])


@settings(max_examples=100, deadline=None)
@given(values)
def test_any_other_json_is_a_named_error(value):
    with pytest.raises(ShardFormatError):
        parse_index(json.dumps(value).encode(), 132)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=4))
def test_a_stride_is_dense_exactly_if_each_element_has_its_own_place_and_no_place_is_left(dims):
    shape, stride = [extent for extent, _ in dims], [step for _, step in dims]
    reached = [0]
    for extent, step in dims:
        reached = [place + step * n for place in reached for n in range(extent)]
    assert is_dense(shape, stride) == (len(reached) > 0 and sorted(reached) == list(range(len(reached))))


def test_a_layout_keeps_tensors_apart_and_aligned():
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (1, 63, 64, 65, 0, 300_000, 5)]
    entries = Layout(flatten(tensors)).entries
    ends = 0
    for entry in entries:
        assert entry.nbytes == 0 or (entry.offset >= ends and entry.offset % 64 == 0)
        ends = max(ends, entry.offset + entry.nbytes)
    assert entries[5].offset % 4096 == 0
