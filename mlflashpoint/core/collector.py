"""Python's garbage collector, which stays away while many objects are made at once that are no garbage."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """For parsing: the collector counts what it meets as long-lived, and soon goes over the whole process for it.

    That takes a tenth of a second or more once torch is imported. Nothing is done where the collector is off anyway,
    nor in other threads, which might turn it on again after the main one has turned it off for good.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
