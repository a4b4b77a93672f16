"""The arguments of a patched function's call, as a wrapper finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Arguments = tuple[Any, ...]


def argument(args: Arguments, kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """The argument that is passed at that position or by that name, None if it is not passed."""
    return args[index] if len(args) > index else kwargs.get(name)
