"""What stands in a state in the place of a leaf that can't be saved, so that the save is refused on all ranks.

A rank that raises before DCP's first exchange leaves the others waiting in it. So staging and sending raise nothing
and put this into the state, which carries the reason into the rank's plan, that the writer refuses, on all ranks. A
planner that leaves the leaf out never meets it.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from mlflashpoint.core.nesting import REMEDY, too_deep
from mlflashpoint.errors import FlashpointError, StateTypeError, StoreFullError

_FILES = (
    "there are too many open files",
    "raise ulimit -n, or call torch.multiprocessing.set_sharing_strategy('file_system'), "
    "or use AsyncCheckpointerType.THREAD",
)
#: what may be short: error number -> what it is, and what helps
_SHORT = {
    errno.ENOSPC: (
        "there is no room in /dev/shm",
        "give /dev/shm more room, or use AsyncCheckpointerType.THREAD, which needs none of it",
    ),
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: ("there is no memory for it", "make room on host and device, or use dcp.save, which makes no copy"),
}
#: torch's allocators give no error number
_NO_MEMORY = ("out of memory", "allocate memory")


class Missing:
    """A leaf that can't be saved.

    Args:
        refusal: the error that the save is refused with.
        why: completes a sentence that begins with the leaf's key.
        remedy: of the error.
    """

    def __init__(self, refusal: type[FlashpointError], why: str, remedy: str) -> None:
        self._refusal = refusal
        self._why = why
        self._remedy = remedy

    @classmethod
    def of(cls, leaf: Any, done: str, error: Exception) -> Missing:
        """For ``leaf``, which can't be ``done`` because of ``error``."""
        if isinstance(error, RecursionError):
            return cls(StateTypeError, f"can't be {done}: {too_deep(leaf, root='it').message}", REMEDY)
        return cls.of_kind(f"{type(leaf).__module__}.{type(leaf).__qualname__}", done, error)

    @classmethod
    def of_kind(cls, kind: str, done: str, error: Exception) -> Missing:
        """The same for a leaf of the type ``kind``."""
        why = f"is a {kind}, which can't be {done}: "
        short = _short_of(error)
        if short is not None:
            return cls(StoreFullError, f"{why}{short[0]}: {error}", short[1])
        return cls(
            StateTypeError,
            f"{why}{type(error).__name__}: {error}",
            "leave it out, store plain data in its place, or register how to pickle its type (copyreg.pickle)",
        )

    def error(self, key: str) -> FlashpointError:
        """For the leaf at ``key``."""
        return self._refusal(f"{key!r} {self._why}", remedy=self._remedy)

    def __create_write_items__(self, fqn: str, leaf: object) -> list[WriteItem]:
        # DCP's planners ask a leaf that has this.
        return [_Refused(MetadataIndex(fqn), WriteItemType.BYTE_IO, missing=self)]

    def __reduce__(self) -> NoReturn:
        # Pickled by a planner of the user's own, it would be in the version.
        raise self.error("what is to be saved")


@dataclass(frozen=True)
class _Refused(WriteItem):
    """In a plan that must not be carried out."""

    missing: Missing | None = None


def missing_of(plan: SavePlan) -> FlashpointError | None:
    """Why ``plan``, a rank's own, is to be refused; None if nothing is missing."""
    found = next((item for item in plan.items if isinstance(item, _Refused)), None)
    return None if found is None or found.missing is None else found.missing.error(found.index.fqn)


def _short_of(error: Exception) -> tuple[str, str] | None:
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return _SHORT[errno.ENOMEM]
    # torch says the number in its text alone.
    named = (code for code in _SHORT if f"{os.strerror(code)} ({code})" in str(error))
    return _SHORT.get(error.errno or 0) if isinstance(error, OSError) else next((_SHORT[code] for code in named), None)


def _sent(missing: Missing) -> tuple[Any, ...]:
    return Missing, (missing._refusal, missing._why, missing._remedy)


ForkingPickler.register(Missing, _sent)
