"""The end of a fit: whether the training is done, or may be gone on with."""

from __future__ import annotations

import sys
from typing import Any


def is_done(trainer: Any) -> bool:
    """For a fit that ends without an exception that leaves it: nobody will want to go on from its versions."""
    return not (_exits() or _is_out_of_time(trainer))


def _exits() -> bool:
    """Whether the fit is torn down because of the exception that Lightning swallows, and tells no callback of."""
    return getattr(sys.exc_info()[0], "__name__", "") == "_TunerExitException"


def _is_out_of_time(trainer: Any) -> bool:
    """Whether ``max_time`` (a Timer callback) is over."""
    for callback in trainer.callbacks:
        remaining = getattr(callback, "time_remaining", None)
        if callable(remaining) and any(kind.__name__ == "Timer" for kind in type(callback).__mro__):
            left = remaining()
            if left is not None and left <= 0:
                return True
    return False
