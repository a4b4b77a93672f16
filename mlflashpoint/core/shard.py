"""The index of a shard: what lies where in its data file, with digests, and the skeleton. JSON, no pickle.

See docs/format.md. A parsed index is safe to use: every tensor it describes lies within the data, none overlap, and
the skeleton is one well-formed state that names only tensors that there are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from mlflashpoint.core.collector import no_collections
from mlflashpoint.core.dtypes import DTYPE_NAMES, DTYPES
from mlflashpoint.core.plain import encode_plain
from mlflashpoint.core.record import FORMAT_VERSION
from mlflashpoint.core.skeleton import Skeleton, dumps, parse_nodes
from mlflashpoint.errors import ShardFormatError

MAX_INDEX_BYTES = 256 << 20
_MAX_DIMS = 64
_MAX_SIZE = 1 << 62
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FIELDS = {"format_version", "data_bytes", "attributes", "skeleton", "tensors"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a shard's data file.

    Attributes:
        name: unique in the shard; where the tensor first appears in the state, for example ``model.layer.weight``.
        dtype: element type.
        shape: sizes.
        offset: of the first byte in the data file, a multiple of the element's size.
        nbytes: length in bytes.
        stride: in elements; None for a contiguous tensor. Always dense: the bytes are exactly the elements.
        digest: xxh3_128 of the bytes, in hex; empty while it is not computed.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int
    stride: tuple[int, ...] | None = None
    digest: str = ""


@dataclass(frozen=True)
class ShardIndex:
    """A parsed index.

    Attributes:
        tensors: in the order that the skeleton refers to.
        skeleton: the state without its tensors.
        attributes: the saver's own plain values, as a skeleton without tensors.
        data_bytes: length of the used part of the data file.
    """

    tensors: tuple[TensorEntry, ...]
    skeleton: Skeleton
    attributes: Skeleton
    data_bytes: int


class IndexTemplate:
    """The parts of an index that stay the same from save to save of one structure.

    Args:
        entries: tensors, without digests.
        skeleton: any skeleton of that structure.
        data_bytes: length of the used part of the data file.
    """

    def __init__(self, entries: Sequence[TensorEntry], skeleton: Skeleton, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self._nodes = skeleton.nodes()
        self._gaps = [place for place, text in enumerate(self._nodes) if not text]
        self._heads, self._tails = [], []
        for entry in entries:
            row = [entry.name, DTYPE_NAMES[entry.dtype], list(entry.shape), entry.offset, entry.nbytes]
            self._heads.append(dumps(row)[:-1] + ',"')
            self._tails.append('"]' if entry.stride is None else f'",{dumps(list(entry.stride))}]')

    def render(self, values: Sequence[Any], digests: Sequence[str], attributes: str) -> bytes:
        """The index.

        Args:
            values: plain values of the skeleton to write.
            digests: one per tensor.
            attributes: from ``render_plain``.
        """
        nodes = list(self._nodes)
        for place, value in zip(self._gaps, values, strict=True):
            nodes[place] = dumps(encode_plain(value))
        rows = ",".join(map("".join, zip(self._heads, digests, self._tails, strict=True)))
        return (
            f'{{"attributes":{attributes},"data_bytes":{self._data_bytes},"format_version":{FORMAT_VERSION},'
            f'"skeleton":[{",".join(nodes)}],"tensors":[{rows}]}}'
        ).encode()


def render_plain(skeleton: Skeleton) -> str:
    """JSON text of a skeleton without tensors."""
    values = iter(skeleton.values)
    return "[" + ",".join(text or dumps(encode_plain(next(values))) for text in skeleton.nodes()) + "]"


def digest_of(data: Any) -> str:
    """xxh3_128 in hex of a bytes-like object."""
    return xxhash.xxh3_128_hexdigest(data)


def new_digest() -> xxhash.xxh3_128:
    """The same of what ``update`` is given piece by piece: its ``hexdigest``."""
    return xxhash.xxh3_128()


@no_collections()
def parse_index(data: bytes | memoryview, data_bytes: int) -> ShardIndex:
    """Read an index.

    Args:
        data: content of the index file.
        data_bytes: length of the used part of the data file, from the commit record.

    Raises:
        ShardFormatError: it is too large, malformed, or does not fit into ``data_bytes``.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise ShardFormatError(f"index of {len(data)} bytes exceeds {MAX_INDEX_BYTES}")
    try:
        raw: Any = json.loads(bytes(data), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ShardFormatError(f"the index is not JSON: {error}") from None
    if type(raw) is not dict or raw.keys() != _FIELDS:
        raise ShardFormatError("the index has not the fields of an index")
    if raw["format_version"] != FORMAT_VERSION:
        raise ShardFormatError(f"index format {str(raw['format_version'])[:40]} is not {FORMAT_VERSION}")
    if type(raw["data_bytes"]) is not int or raw["data_bytes"] != data_bytes:
        raise ShardFormatError(f"the index is not that of {data_bytes} bytes of data")
    if type(raw["tensors"]) is not list:
        raise ShardFormatError("the index has no tensor table")
    entries = tuple(_parse_entry(row, data_bytes) for row in raw["tensors"])
    _check_apart(entries)
    return ShardIndex(
        tensors=entries,
        skeleton=parse_nodes(raw["skeleton"], len(entries)),
        attributes=parse_nodes(raw["attributes"], 0),
        data_bytes=data_bytes,
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parse_entry(row: Any, data_bytes: int) -> TensorEntry:
    def malformed(why: str) -> ShardFormatError:
        return ShardFormatError(f"tensor table: {why}: {str(row)[:120]}")

    if type(row) is not list or len(row) not in (6, 7):
        raise malformed("not a row")
    name, kind, shape, offset, nbytes, digest = row[:6]
    if type(name) is not str or type(digest) is not str or not _DIGEST.fullmatch(digest):
        raise malformed("a name or digest is malformed")
    dtype = DTYPES.get(kind) if type(kind) is str else None
    if dtype is None:
        raise malformed("a dtype that this torch does not have")
    if not _sizes(shape) or type(offset) is not int or type(nbytes) is not int:
        raise malformed("a shape, offset or length is malformed")
    size = dtype.itemsize
    if math.prod(shape) * size != nbytes:
        raise malformed("the length is not that of the shape")
    if math.prod(max(extent, 1) for extent in shape) * size >= _MAX_SIZE:
        raise malformed("an impossible shape")
    if not 0 <= offset <= data_bytes - nbytes or offset % size:
        raise malformed("it does not lie in the data")
    stride = None
    if len(row) == 7:
        if not _sizes(row[6]) or not is_dense(shape, row[6]):
            raise malformed("the stride is not dense")
        stride = tuple(row[6])
    return TensorEntry(name, dtype, torch.Size(shape), offset, nbytes, stride, digest)


def _sizes(raw: Any) -> bool:
    return type(raw) is list and len(raw) <= _MAX_DIMS and all(type(n) is int and 0 <= n < _MAX_SIZE for n in raw)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of that shape and stride fill their memory exactly, none twice; not so without elements."""
    if len(shape) != len(stride) or 0 in shape:
        return False
    expected = 1
    for step, extent in sorted((step, extent) for extent, step in zip(shape, stride, strict=True) if extent != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def _check_apart(entries: Sequence[TensorEntry]) -> None:
    end = 0
    for entry in sorted((entry for entry in entries if entry.nbytes), key=lambda entry: entry.offset):
        if entry.offset < end:
            raise ShardFormatError(f"tensor table: {entry.name!r} overlaps another tensor")
        end = entry.offset + entry.nbytes
    if len({entry.name for entry in entries}) != len(entries):
        raise ShardFormatError("tensor table: one name twice")


def by_name(entries: Sequence[TensorEntry]) -> Mapping[str, TensorEntry]:
    return {entry.name: entry for entry in entries}
