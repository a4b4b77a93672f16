"""Reading something on all ranks at once that may fail on one for a moment: it is tried again, by all or by none.

A rank that is short of memory, or whose network stands still, has found no fault in what it reads. What fails for
another reason, or again and again, is given up by all ranks.
"""

from __future__ import annotations

import errno
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

if TYPE_CHECKING:
    from mlflashpoint.core.runtime import Runtime

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: before the second attempt, and before the third one, which is the last
_PAUSES_S = (0.5, 3.0)

_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
#: by name: torch's, and those of the libraries below fsspec
_PASSING_KINDS = ("OutOfMemoryError", "MemoryError", "TimeoutError", "Timeout", "ConnectionError")
_PASSING_WORDS = ("can't allocate memory", "out of memory")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """How it went.

    Attributes:
        value: what this rank's call gave, None unless every rank's gave something.
        error: what this rank's last call raised, if it did.
    """

    value: T | None
    error: BaseException | None = None


def attempt(runtime: Runtime, key: str, what: str, action: Callable[[], T]) -> Attempt[T]:
    """Call ``action`` on every rank until it goes well on all, or is given up by all; collective.

    Args:
        runtime: this rank's store, for the ranks to agree.
        key: names the occasion, see ``Runtime.agree``.
        what: what ``action`` does, for the log.
        action: may be called again after it has raised something; never gives None.
    """
    for pause_s in (*_PAUSES_S, None):
        value: T | None = None
        error: BaseException | None = None
        try:
            value = action()
        except (Exception, CheckpointException) as problem:  # whatever a format, a file system or a strategy raises
            # The frames hold what has been read so far.
            error = problem.with_traceback(None)
        if runtime.agree(key, error is None):
            return Attempt(value)
        value = None
        again = runtime.agree(f"{key}/passing", error is None or is_passing(error))
        if pause_s is None or not again:
            break
        why = "another rank could not" if error is None else f"{type(error).__name__}: {error}"
        _log.warning("%s: %s; all ranks try again in %g s", what, why, pause_s)
        gc.collect()
        time.sleep(pause_s)
    return Attempt(None, error)


def refuse(runtime: Runtime, key: str) -> None:
    """Take part in the others' ``attempt`` of this key, as a rank that can't."""
    runtime.agree(key, False)
    runtime.agree(f"{key}/passing", False)


def is_passing(error: BaseException) -> bool:
    """Whether ``error`` tells of this process or of the way to the data, and not of the data."""
    if isinstance(error, CheckpointException):
        return bool(error.failures) and all(is_passing(failure[0]) for failure in error.failures.values())
    if isinstance(error, OSError) and error.errno in _PASSING:
        return True
    if any(kind.__name__ in _PASSING_KINDS for kind in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _PASSING_WORDS):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)
