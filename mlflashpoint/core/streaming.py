"""Moves memory from many places to many others in one call, past the caches and without the interpreter's lock.

The library is built with the package where there is a compiler. Where there is none, the C library moves one after the
other: correct, and up to twice as slow.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


def addresses(numbers: Iterable[int]) -> array[int]:
    """The numbers as ``move`` takes them."""
    return array("Q", numbers)


def move(to: array[int], of: array[int], sizes: array[int], first: int, end: int) -> None:
    """Copy ``sizes[i]`` bytes from address ``of[i]`` to address ``to[i]``, for each i from ``first`` to before ``end``.

    No two places may overlap. When this returns, all is visible to other threads and processes.
    """
    library = _library()
    if library is not None:
        skipped = first * sizes.itemsize
        library(*(numbers.buffer_info()[0] + skipped for numbers in (to, of, sizes)), end - first)
        return
    for place in range(first, end):
        _memmove(to[place], of[place], sizes[place])


def available() -> bool:
    """Whether the library was built."""
    return _library() is not None


@functools.cache
def _library() -> Callable[..., None] | None:
    for path in sorted(Path(__file__).parent.glob("_stream.*so")):
        try:
            function = ctypes.CDLL(str(path)).mlflashpoint_copy
        except (OSError, AttributeError):
            # Built for another kind of machine.
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        function.restype = None
        return function  # type: ignore[no-any-return]
    return None
