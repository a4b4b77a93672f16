"""Whether all ranks can go on to the next collective; if one can't, an error on each that says which and why."""

from __future__ import annotations

import weakref
from collections import Counter

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import PeerError

#: how often each store was asked about what; the ranks number their rounds alike
_rounds: weakref.WeakKeyDictionary[Runtime, Counter[str]] = weakref.WeakKeyDictionary()


def all_ready(runtime: Runtime, what: str, problem: Exception | None) -> None:
    """Go on only if no rank has a problem; collective.

    Raises:
        the problem itself on the rank that has it, PeerError with its text on the others; on all within the deadline.
    """
    rounds = _rounds.setdefault(runtime, Counter())
    rounds[what] += 1
    channel: Channel | None = None
    if runtime.world_size > 1:
        channel = runtime.channel("megatron").under(f"megatron/{what}/{rounds[what]}")
        if problem is not None:
            channel.decide("problem", f"rank {runtime.rank}: {type(problem).__name__}: {problem}"[:1000])
    ready = runtime.agree(f"megatron/{what}", problem is None)
    if problem is not None:
        raise problem
    if not ready:
        told = None if channel is None else channel.read("problem")
        raise PeerError(str(told or "another rank did not answer in time"), rank=runtime.rank)
