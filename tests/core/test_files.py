import contextlib
import json
import os

import pytest

from mlflashpoint.core.files import file_error, read_file, seal, unseal
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.errors import ContainerError, ShardFormatError, StoreFullError

FIELDS = {"step": 100, "created_s": 1764450000.125, "job_id": "j", "inner": [1, None, {"b": True}]}


def test_what_was_sealed_comes_back():
    assert unseal(seal(FIELDS), "it") == FIELDS


def test_every_flipped_bit_of_a_commit_record_is_noticed():
    record = ShardRecord(
        job_id="j",
        group="default",
        incarnation=1,
        step=100,
        rank=0,
        world_size=2,
        topology="",
        index_bytes=10,
        index_digest="00" * 16,
        data_bytes=8,
        created_s=1764450000.125,
    )
    whole = record.to_json()
    assert ShardRecord.from_json(whole) == record
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with contextlib.suppress(ShardFormatError):
                assert ShardRecord.from_json(bytes(flipped)) == record, bytes(flipped)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", b'{"digest": 7}', b"[" * 100_000, json.dumps(FIELDS).encode()]
)
def test_what_has_no_seal_is_a_named_error(content):
    with pytest.raises(ShardFormatError, match="the thing"):
        unseal(content, "the thing")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / "it")
    with pytest.raises(OSError):
        read_file(tmp_path / "it", 100)


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (28, StoreFullError, "free memory"),
        (13, ContainerError, "let this job's user"),
        (2, ContainerError, "leave the"),
    ],
)
def test_the_remedy_goes_with_the_cause(tmp_path, number, kind, remedy):
    error = file_error("it failed", OSError(number, os.strerror(number)), path=tmp_path, step=3)
    assert type(error) is kind and error.remedy.startswith(remedy) and error.step == 3
