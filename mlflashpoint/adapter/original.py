"""The original of a patched function, as what stands around it sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Original(Protocol):
    """The one call of a patched function: with the caller's arguments, or with others."""

    error: BaseException | None

    def __call__(self) -> Any: ...

    def using(self, *args: Any, **kwargs: Any) -> Any: ...


def as_originals(original: Original, work: Callable[[], T]) -> T:
    """Run ``work``, a part of the job's own training: what it raises is the job's, and not a fault of ours."""
    try:
        return work()
    except Exception as error:
        original.error = error
        raise
