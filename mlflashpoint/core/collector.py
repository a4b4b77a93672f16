"""Python's garbage collector, which stays away while many objects are made at once that are no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """For parsing: the collector counts what it meets as long-lived, and soon goes over the whole process for it.

    That takes a tenth of a second or more once torch is imported. Nothing is done where the collector is off anyway.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
