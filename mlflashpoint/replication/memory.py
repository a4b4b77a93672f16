"""Bytes as the engines want them: flat views, their addresses, and the pieces that a transfer is cut into."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

#: largest single message; progress is counted in these
PIECE_BYTES = 64 << 20
_SMALLEST_PIECE = 1 << 20


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


def flat(buffer: memoryview) -> memoryview:
    """The same bytes as a one-dimensional view of bytes; raises TypeError for a view that is not contiguous."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous else buffer.cast("B")


def address_of(view: memoryview) -> int:
    """Address of the first byte; valid while the view is held and what it views is not closed."""
    raw = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    try:
        return int(raw.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))


def as_tensor(view: memoryview) -> torch.Tensor:
    """A uint8 tensor of shape ``[len(view)]`` over the very same bytes; the caller keeps ``view`` alive.

    Made from the address, because torch warns of every read-only buffer that it is given.
    """
    return torch.frombuffer((ctypes.c_ubyte * len(view)).from_address(address_of(view)), dtype=torch.uint8)


def cut(buffers: Sequence[memoryview], offset: int, length: int, lanes: int) -> list[list[memoryview]]:
    """The range ``[offset, offset + length)`` of the buffers laid end to end, as one list of pieces for each lane.

    Both ends of a transfer cut buffers of equal sizes, and so arrive at equal pieces. Empty pieces are left out.
    """
    piece = min(PIECE_BYTES, max(_SMALLEST_PIECE, -(-length // lanes)))
    dealt: list[list[memoryview]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for part in _ranges(buffers, offset, length):
        for start in range(0, len(part), piece):
            lane = load.index(min(load))
            dealt[lane].append(part[start : start + piece])
            load[lane] += len(dealt[lane][-1])
    return dealt


def _ranges(buffers: Sequence[memoryview], offset: int, length: int) -> Iterator[memoryview]:
    end = offset + length
    for buffer in buffers:
        size = len(buffer)
        if offset < size and end > 0:
            yield buffer[max(0, offset) : min(size, end)]
        offset, end = offset - size, end - size
