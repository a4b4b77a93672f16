"""A DCP checkpoint's ``Metadata`` as JSON, with the rank that wrote each chunk; no pickle.

Every rank's shard carries it whole, so any one surviving shard tells what the version holds and where each chunk lies.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mlflashpoint.core.collector import no_collections
from mlflashpoint.core.nesting import too_deep
from mlflashpoint.errors import ShardFormatError, StateTypeError

_FORMAT = 1
#: Attributes that Megatron-Core hangs on the metadata for the saving process alone: every rank's whole plan.
_TRANSIENT = frozenset({"state_dict_metadata", "storage_data", "all_local_plans"})

#: ``(fully qualified name, offsets)``; None as offsets for what is no tensor
ChunkKey = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class VersionMetadata:
    """What one version of a DCP checkpoint holds.

    Attributes:
        metadata: DCP's own description, without storage data.
        holders: for each chunk or object the rank whose shard has it.
    """

    metadata: Metadata
    holders: Mapping[ChunkKey, int]

    def holder(self, index: MetadataIndex) -> int:
        """The rank whose shard holds ``index``; raises KeyError."""
        return self.holders[chunk_key(index)]


def chunk_key(index: MetadataIndex) -> ChunkKey:
    return index.fqn, None if index.offset is None else tuple(index.offset)


def encode_metadata(metadata: Metadata, holders: Mapping[ChunkKey, int]) -> bytes:
    """JSON of ``metadata`` and ``holders``; equal inputs give equal bytes.

    Raises:
        StateTypeError: planner data of a type that is not plain, or nested too deep; names type and key.
        ShardFormatError: a chunk that no rank wrote.
    """
    properties: dict[tuple[object, ...], int] = {}
    entries: list[list[object]] = []
    try:
        for fqn, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                kind = properties.setdefault(_describe(entry.properties), len(properties))
                size = tuple(entry.size)
                chunks: list[object] = []
                for chunk in entry.chunks:
                    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                    holder = holders[fqn, offsets]
                    chunks.append(holder if sizes == size and not any(offsets) else (offsets, sizes, holder))
                entries.append([fqn, kind, size, chunks])
            else:
                entries.append([fqn, holders[fqn, None]])
    except KeyError as error:
        raise ShardFormatError(f"the planner's metadata names {error.args[0]!r}, which no rank wrote") from None
    added = {name: value for name, value in vars(metadata).items() if name not in _TRANSIENT and value is not None}
    try:
        extra = {name: _to_plain(value, name) for name, value in added.items()}
        document = {"format": _FORMAT, "properties": list(properties), "entries": entries, "extra": extra}
        return json.dumps(document, separators=(",", ":")).encode()
    except RecursionError as error:
        raise too_deep(added, root="the planner's data: ") from error


@no_collections()
def decode_metadata(data: bytes) -> VersionMetadata:
    """The inverse of ``encode_metadata``; raises ShardFormatError for anything malformed."""
    try:
        document = json.loads(data)
        if document["format"] != _FORMAT:
            raise ShardFormatError(f"DCP metadata of format {document['format']!r}, not {_FORMAT}")
        kinds = [_properties(tuple(kind)) for kind in document["properties"]]
        content: dict[str, Any] = {}
        holders: dict[ChunkKey, int] = {}
        shapes = _Shapes()
        for entry in document["entries"]:
            fqn = _of(str, entry[0])
            if len(entry) == 2:
                content[fqn] = BytesStorageMetadata()
                holders[fqn, None] = _of(int, entry[1])
                continue
            size = shapes[tuple(entry[2])]
            chunks = []
            for chunk in entry[3]:
                if type(chunk) is int:
                    offsets, sizes, holder = shapes[(0,) * len(size)], size, chunk
                else:
                    offsets, sizes, holder = shapes[tuple(chunk[0])], shapes[tuple(chunk[1])], _of(int, chunk[2])
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
                # Equal to the plain tuple that it is looked up by.
                holders[fqn, offsets] = holder
            # One object per tensor: a planner may change them.
            properties = TensorProperties(*kinds[entry[1]])
            content[fqn] = TensorStorageMetadata(properties=properties, size=size, chunks=chunks)
        metadata = Metadata(state_dict_metadata=content)
        for name, value in document["extra"].items():
            # A field or an attribute that a planner added, never one of the object's own methods.
            if name.startswith("_") or name in _TRANSIENT or callable(getattr(Metadata, name, None)):
                raise ShardFormatError(f"DCP metadata with an attribute {name!r}")
            setattr(metadata, name, _from_plain(value))
    except ShardFormatError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ShardFormatError(f"malformed DCP metadata: {type(error).__name__}: {error}") from None
    return VersionMetadata(metadata=metadata, holders=holders)


class _Shapes(dict[tuple[int, ...], torch.Size]):
    """One object for all equal shapes: few new objects keep the garbage collector from going over the whole process."""

    def __missing__(self, shape: tuple[int, ...]) -> torch.Size:
        made = self[shape] = torch.Size(shape)
        return made


def _describe(properties: TensorProperties) -> tuple[object, ...]:
    return (
        str(properties.dtype).partition(".")[2],
        str(properties.layout).partition(".")[2],
        bool(properties.requires_grad),
        str(properties.memory_format).partition(".")[2],
        bool(properties.pin_memory),
    )


def _properties(described: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of ``TensorProperties``."""
    dtype, layout, requires_grad, memory_format, pin_memory = described
    return (
        _torch_constant(dtype, torch.dtype),
        _torch_constant(layout, torch.layout),
        _of(bool, requires_grad),
        _torch_constant(memory_format, torch.memory_format),
        _of(bool, pin_memory),
    )


def _torch_constant(name: str, kind: type) -> Any:
    return _of(kind, getattr(torch, _of(str, name), None))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ShardFormatError(f"malformed DCP metadata: {value!r} is no {kind.__name__}")
    return value


def _to_plain(value: Any, key: str) -> Any:
    """Planner data as JSON: scalars as they are, everything else as a one-entry object that names its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_to_plain(entry, f"{key}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, tuple):
        return {"tuple": [_to_plain(entry, f"{key}[{i}]") for i, entry in enumerate(value)]}
    if isinstance(value, Mapping):
        if value and all(map(_is_path, value.items())):
            return {"paths": [[name, list(path)] for name, path in value.items()]}
        pairs = [[_to_plain(k, f"{key} key"), _to_plain(v, f"{key}.{k}")] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).partition(".")[2]}
    if isinstance(value, slice):
        return {"slice": [_to_plain(part, key) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and type(value).__name__ == "StorageMeta":
        return None  # where and by whom it was saved, which the reader of a version knows better
    raise StateTypeError(
        f"the planner's data holds a {type(value).__module__}.{type(value).__qualname__} at {key!r}",
        remedy="let the planner store plain data (dict, list, tuple, str, bytes, numbers, None)",
    )


def _is_path(entry: tuple[Any, Any]) -> bool:
    """Whether it is an entry of DCP's own planner data: a flattened name, and the keys that it was made of."""
    name, path = entry
    return type(name) is str and type(path) is tuple and all(type(key) is str or type(key) is int for key in path)


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_from_plain(entry) for entry in content)
    if kind == "paths":
        return {_of(str, name): tuple(path) for name, path in content}
    if kind == "dict":
        return {_from_plain(k): _from_plain(v) for k, v in content}
    if kind == "size":
        return torch.Size(content)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "dtype":
        return _torch_constant(content, torch.dtype)
    if kind == "slice":
        return slice(*map(_from_plain, content))
    raise ShardFormatError(f"malformed DCP metadata: unknown kind {kind!r}")
