"""numpy's arrays and scalars on the allow-list; imported only where numpy is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mlflashpoint.core.leaves import register_leaf
from mlflashpoint.core.standard_leaves import bytes_of, tensor_of
from mlflashpoint.errors import StateTypeError

#: plain kinds only: no objects, which are pickles, and no records
_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,7}\])?|\|b1")


def register() -> None:
    """Add the array and every scalar type; may be called again."""
    register_leaf("numpy.ndarray", np.ndarray, _take_apart, _put_together)
    for cls in {cls for cls in np.sctypeDict.values() if cls not in (np.object_, np.void)}:
        # Two C types of one size are two classes with equal dtypes; each name stands for one class.
        register_leaf(f"numpy.{cls.__name__}", cls, _take_apart, lambda state: _put_together(state)[()])


def _take_apart(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if not _DTYPE.fullmatch(array.dtype.str):
        raise StateTypeError(f"a numpy array of dtype {array.dtype}", remedy="store numbers, or register_leaf a type")
    flat = np.ascontiguousarray(array).reshape(-1)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": tensor_of(flat.tobytes())}


def _put_together(state: Any) -> Any:
    dtype, shape, data = state["dtype"], state["shape"], state["data"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"a numpy dtype {dtype!r}")
    return np.frombuffer(bytes_of(data), dtype=np.dtype(dtype)).reshape(shape).copy()
