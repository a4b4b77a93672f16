"""DCP metadata goes through JSON and back unchanged, and nothing in it is ever executed."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mlflashpoint.adapter.pytorch.metadata_codec import chunk_key, decode_metadata, encode_metadata
from mlflashpoint.errors import ShardFormatError, StateTypeError


def planned(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    return metadata, {chunk_key(item.index): 0 for item in plans[0].items}


def sharded():
    """A 5 x 4 tensor in three uneven chunks on ranks 2, 0 and 1."""
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4])),
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([3, 1])),
        ChunkStorageMetadata(torch.Size([2, 1]), torch.Size([3, 3])),
    ]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([5, 4]), chunks)
    holders = {("t", (0, 0)): 2, ("t", (2, 0)): 0, ("t", (2, 1)): 1, ("b", None): 1}
    return Metadata({"t": entry, "b": BytesStorageMetadata()}), holders


def test_a_planned_state_comes_back_equal_with_its_order():
    state = {"b": {"x": torch.ones(2, 3), "s": torch.tensor(1)}, "a": [torch.zeros(0, 4), "text"], "n": None}
    metadata, holders = planned(state)
    decoded = decode_metadata(encode_metadata(metadata, holders))
    assert decoded.metadata == metadata
    assert list(decoded.metadata.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert decoded.holders == holders


def test_chunks_come_back_with_the_rank_that_holds_each():
    metadata, holders = sharded()
    decoded = decode_metadata(encode_metadata(metadata, holders))
    assert decoded.metadata == metadata
    assert decoded.holder(MetadataIndex("t", [2, 1])) == 1
    assert decoded.holder(MetadataIndex("b")) == 1


def test_properties_come_back_and_are_not_shared():
    properties = TensorProperties(torch.float16, requires_grad=True, memory_format=torch.channels_last, pin_memory=True)
    entries = {
        name: TensorStorageMetadata(
            dataclasses.replace(properties), torch.Size([1]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]
        )
        for name in "ab"
    }
    found = decode_metadata(encode_metadata(Metadata(entries), {("a", (0,)): 0, ("b", (0,)): 0})).metadata
    one, other = (found.state_dict_metadata[name].properties for name in "ab")
    assert one == properties
    assert one is not other


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(deadline=None, max_examples=60)
@given(data=plain)
def test_planner_data_of_plain_types_comes_back_equal(data):
    decoded = decode_metadata(encode_metadata(Metadata({}, planner_data=data), {}))
    assert decoded.metadata.planner_data == data


def test_torch_kinds_in_planner_data_keep_their_type():
    data = {"s": torch.Size([2, 3]), "d": torch.bfloat16, "r": slice(1, None)}
    found = decode_metadata(encode_metadata(Metadata({}, planner_data=data), {})).metadata.planner_data
    assert found == data
    assert type(found["s"]) is torch.Size


def test_an_attribute_that_a_planner_added_survives():
    metadata, holders = sharded()
    metadata.mcore_data = {"t": {"nd_reformulated_orig_global_shape": (5, 4)}}
    metadata.all_local_plans = ["plans of all ranks are for the saving process alone"]
    found = decode_metadata(encode_metadata(metadata, holders)).metadata
    assert found.mcore_data == metadata.mcore_data
    assert not hasattr(found, "all_local_plans")


def test_planner_data_that_is_not_plain_is_refused_by_type_and_key():
    with pytest.raises(StateTypeError, match=r"random\.Random at 'planner_data\.seed'"):
        import random

        encode_metadata(Metadata({}, planner_data={"seed": random.Random(1)}), {})


def test_paths_in_planner_data_become_text():
    found = decode_metadata(encode_metadata(Metadata({}, planner_data=Path("/a/b")), {}))
    assert found.metadata.planner_data == "/a/b"


def test_a_chunk_that_no_rank_wrote_is_refused():
    metadata, holders = sharded()
    del holders["t", (2, 1)]
    with pytest.raises(ShardFormatError, match="no rank wrote"):
        encode_metadata(metadata, holders)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format=2),
        lambda d: d.pop("entries"),
        lambda d: d["entries"].append(["x"]),
        lambda d: d["entries"][0].__setitem__(1, 9),
        lambda d: d["entries"][0].__setitem__(2, ["a"]),
        lambda d: d["entries"][0][3].append("0"),
        lambda d: d["entries"].append([1, 1]),
        lambda d: d["entries"].append(["x", "1"]),
        lambda d: d["properties"][0].__setitem__(0, "load"),
        lambda d: d["properties"][0].__setitem__(0, "nn"),
        lambda d: d["properties"][0].__setitem__(2, 1),
        lambda d: d["extra"].update(__class__=1),
        lambda d: d["extra"].update(state_dict_metadata=1),
        lambda d: d["extra"].update(planner_data={"call": ["os.system"]}),
        lambda d: d["extra"].update(planner_data={"dict": [[{"dict": []}, 1]]}),
        lambda d: d["extra"].update(planner_data={"a": 1, "b": 2}),
    ],
)
def test_malformed_metadata_is_refused(change):
    document = json.loads(encode_metadata(*sharded()))
    change(document)
    with pytest.raises(ShardFormatError):
        decode_metadata(json.dumps(document).encode())


@settings(deadline=None, max_examples=200)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_still_metadata(place, byte):
    data = bytearray(encode_metadata(*sharded()))
    data[place % len(data)] = byte
    with contextlib.suppress(ShardFormatError):
        assert isinstance(decode_metadata(bytes(data)).metadata, Metadata)


def test_planner_data_that_nests_too_deep_is_refused_by_its_place():
    metadata, holders = sharded()
    deep = 1
    for _ in range(20_000):
        deep = [deep]
    metadata.planner_data = {"own": deep}
    with pytest.raises(StateTypeError, match=r"the planner's data: \.planner_data\.own\[0\].*nested too deep"):
        encode_metadata(metadata, holders)
