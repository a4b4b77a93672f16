"""The line in the log that tells how long a framework's save held up training, whichever way it was saved."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def timed(log: logging.Logger, kind: str, step: int, work: Callable[[], T]) -> T:
    """Run ``work``, a save of ``step``, and log its time in milliseconds; ``kind`` says where it went."""
    started = time.perf_counter()
    result = work()
    fields = {
        "blocking_ms": round((time.perf_counter() - started) * 1e3, 3),
        "kind": kind,
        "rank": dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
        "step": step,
    }
    log.info("mlflashpoint observe %s", json.dumps(fields))
    return result
