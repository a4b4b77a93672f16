"""What may be pickled into a version, and what is refused by name."""

import argparse
import collections
import datetime
import enum
import io
import pathlib

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from mlflashpoint.adapter.pytorch import StructureSavePlanner
from mlflashpoint.adapter.pytorch.registered import require_registered, serialises_by_default
from mlflashpoint.errors import StateTypeError

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


class Words(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        "text",
        b"bytes" * 5000,
        [1, (2, {"a": {3}})],
        Point(1, 2),
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        torch.float16,
        torch.Size([1, 2]),
        (torch.ones(2), [torch.nn.Parameter(torch.ones(1))]),
        torch.ones(2, 2).to_sparse(),
        np.arange(3),
        np.float64(1.5),
        argparse.Namespace(rate=0.1),
        pathlib.PosixPath("/a"),
        io.BytesIO(b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_and_registered_types_pass(value):
    require_registered("key", value)


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (Colour.RED, "'key'", "Colour"),
        ([1, {"when": datetime.date(2026, 1, 1)}], "'key[1].when'", "datetime.date"),
        ({"words": Words(a=1)}, "'key.words'", "Words"),
        ({Colour.RED: 1}, "'key key'", "Colour"),
        ((Point(1, Colour.RED),), "'key[0][1]'", "Colour"),
        (lambda: 1, "'key'", "function"),
    ],
)
def test_other_types_are_refused_with_key_type_and_remedy(value, place, kind):
    with pytest.raises(StateTypeError) as caught:
        require_registered("key", value)
    for word in (place, kind, "register_leaf", "add_safe_globals"):
        assert word in str(caught.value)


def test_a_state_that_contains_itself_ends():
    loop = [1]
    loop.append(loop)
    require_registered("key", loop)


def test_only_what_torch_itself_would_pickle_is_looked_at():
    class Renaming(DefaultSavePlanner):
        def set_up_planner(self, *args, **kwargs):
            super().set_up_planner(*args, **kwargs)

    class Own(DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return io.BytesIO(b"mine")

    assert serialises_by_default(DefaultSavePlanner()) and serialises_by_default(Renaming())
    assert not serialises_by_default(Own()) and not serialises_by_default(StructureSavePlanner())


def test_an_object_that_nests_too_deep_to_be_pickled_is_refused_by_its_key_with_a_remedy_that_fits():
    deep = []
    for _ in range(20_000):
        deep = [deep]
    planner = StructureSavePlanner()
    with pytest.raises(StateTypeError, match=r"^meta\.deep\[0\]\[0\].*nested too deep.*remedy: store it flatter"):
        planner.transform_object(WriteItem(MetadataIndex("meta.deep"), WriteItemType.BYTE_IO), deep)
