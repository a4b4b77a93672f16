"""The element types that a shard can hold, by the names they have in a file."""

from __future__ import annotations

import torch

_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

#: name in a file -> dtype, of those that this torch has
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
