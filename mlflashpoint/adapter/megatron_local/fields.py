"""Fields of a configuration that have other values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def fields_set(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of ``target`` have other values inside, and their own again after it."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
