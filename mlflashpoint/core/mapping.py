"""A file in memory, mapped into this process: allocated in full before anything is written, so that a full file system
is an error at once and never a bus error later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mlflashpoint.core.files import file_error, open_regular
from mlflashpoint.core.filesystem import MEMORY_KINDS, filesystem_kind
from mlflashpoint.errors import ShardFormatError, StoreFullError

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000
#: bytes per populate call: other threads, and signals, get their turn in between
_STRIDE = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """A mapped file.

    Attributes:
        nbytes: length in bytes.
        bytes: all of it as a uint8 tensor; it, and every view of it, keeps the mapping alive.
    """

    def __init__(self, region: mmap.mmap) -> None:
        self._region = region
        self.nbytes = len(region)
        self.bytes = as_tensor(region, self.nbytes)

    @property
    def buffer(self) -> memoryview:
        """All of it; keeps the mapping alive as well."""
        return memoryview(self._region)

    def populate(self, *, write: bool) -> None:
        """Map every page now, so that no copy meets a page fault; changes no content."""
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        address = self.bytes.data_ptr()
        for start in range(0, self.nbytes, _STRIDE):
            length = min(_STRIDE, self.nbytes - start)
            if _libc.madvise(address + start, length, advice) != 0:
                # Linux before 5.14 does not know the advice. Touching a page does the same, more slowly.
                pages = self.bytes[start : start + length : mmap.PAGESIZE]
                pages.add_(0) if write else pages.sum()


def as_tensor(buffer: Any, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` bytes of a buffer as a uint8 tensor that keeps it alive.

    One over read-only memory is not to be written to.
    """
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)


def map_writable(path: Path) -> Mapping | None:
    """Map an existing file, whole; None if it is empty.

    Raises:
        StoreFullError: it has holes, left by whoever made it longer, and there is no room to fill them.
        ContainerError: it can't be mapped.
    """
    with _explained(path):
        descriptor = open_regular(path, os.O_RDWR)
        try:
            status = os.fstat(descriptor)
            if _has_holes(status):
                os.posix_fallocate(descriptor, 0, status.st_size)
            return Mapping(mmap.mmap(descriptor, status.st_size)) if status.st_size else None
        finally:
            os.close(descriptor)


def map_readable(path: Path, nbytes: int) -> Mapping | None:
    """Map the first ``nbytes`` bytes for reading, None if there are none.

    Raises:
        ShardFormatError: the file is shorter.
        ContainerError: it can't be opened.
    """
    with _explained(path):
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            if status.st_size < nbytes:
                raise ShardFormatError(f"the data file has {status.st_size} bytes, not {nbytes}", path=path)
            if _has_holes(status) and filesystem_kind(path) in MEMORY_KINDS:
                # Reading a hole takes memory, and where there is none left it ends the process.
                raise ShardFormatError("the data file has holes", path=path)
            if nbytes == 0:
                return None
            try:
                # Private: a stray write through a view can't reach the store, and none is ever made.
                private = mmap.MAP_PRIVATE | _MAP_NORESERVE
                return Mapping(mmap.mmap(descriptor, nbytes, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE))
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                # Strict overcommit counts private writable memory.
                return Mapping(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)


def allocate(path: Path, nbytes: int) -> None:
    """Make a file of mode 0600 at ``path``, or lengthen it, with all of its memory allocated; keeps its content.

    Raises:
        StoreFullError: there is not enough room; an existing file is then as it was.
        ContainerError: it can't be made.
    """
    with _explained(path):
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)


def _has_holes(status: os.stat_result) -> bool:
    return status.st_blocks * 512 < status.st_size


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(
                f"no room for the slot's data: {error.strerror}",
                path=path,
                remedy="give the memory file system more room, or keep fewer versions (MLFLASHPOINT_KEEP_VERSIONS)",
            ) from error
        raise file_error("the slot's data can't be used", error, path=path) from error
