"""Plain values in JSON: what a state holds beside tensors and containers, exact to the bit.

``null``, booleans, strings, finite floats and integers of 64 bits stand for themselves; everything else is a list
``[tag, ...]``. No value is ever turned back by calling a name that the file gives.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from typing import Any

import torch

from mlflashpoint.errors import ShardFormatError, StateTypeError

#: types whose values a skeleton holds as they are; all immutable
PLAIN_TYPES = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
    }
)

_JSON_INT = 1 << 63
_MAX_KEY_DEPTH = 8
#: named singletons of torch that a file may name
_NAMED: dict[str, dict[str, Any]] = {
    tag: {
        str(found).removeprefix("torch."): found
        for found in (getattr(torch, name) for name in dir(torch))
        if isinstance(found, kind)
    }
    for tag, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
}


def encode_plain(value: Any, depth: int = 0) -> Any:
    """JSON value of one of ``PLAIN_TYPES``, or of a tuple of such as a dictionary's key.

    Raises:
        StateTypeError: of another type, or a tuple that is nested too deep to be read again.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if -_JSON_INT <= value < _JSON_INT:
            return value
        return ["int", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
    if kind is complex:
        return ["complex", struct.pack(">dd", value.real, value.imag).hex()]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is torch.Size:
        return ["size", list(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is torch.dtype or kind is torch.layout or kind is torch.memory_format:
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind is tuple:
        if depth >= _MAX_KEY_DEPTH:
            raise StateTypeError(f"tuples nested more than {_MAX_KEY_DEPTH} deep")
        return ["key", [encode_plain(item, depth + 1) for item in value]]
    raise StateTypeError(f"{kind.__module__}.{kind.__qualname__} is no plain value")


def decode_plain(raw: Any, depth: int = 0) -> Any:
    """The value that ``encode_plain`` gave; raises ShardFormatError for anything else."""
    if raw is None or type(raw) in (bool, str, int, float):
        return raw
    try:
        if type(raw) is not list or len(raw) != 2 or depth > _MAX_KEY_DEPTH:
            raise ValueError("not a tagged value")
        tag, body = raw
        if tag == "key" and type(body) is list:
            return tuple(decode_plain(item, depth + 1) for item in body)
        if tag == "size" and type(body) is list and all(type(size) is int and size >= 0 for size in body):
            return torch.Size(body)
        if type(tag) is not str or type(body) is not str:
            raise ValueError("not a tagged value")
        if tag == "int":
            return int(body, 16)
        if tag == "float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
        if tag == "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(body)))
        if tag == "bytes":
            return base64.b64decode(body, validate=True)
        if tag == "device":
            return torch.device(body)
        return _NAMED[tag][body]
    except ShardFormatError:
        raise
    except (ValueError, KeyError, OverflowError, struct.error, binascii.Error, RuntimeError) as error:
        raise ShardFormatError(f"malformed value in the skeleton: {str(raw)[:80]!r} ({error})") from None


def key_kinds(keys: list[Any]) -> list[Any]:
    """What tells keys apart that Python calls equal: 1, True and 1.0, or 0.0 and -0.0."""
    kinds: list[Any] = list(map(type, keys))
    return kinds if {str, int, bool}.issuperset(kinds) else list(map(_key_kind, keys))


def _key_kind(key: Any) -> Any:
    kind = type(key)
    if kind is tuple:
        return tuple(map(_key_kind, key))
    return (kind, repr(key)) if kind is float or kind is complex else kind
