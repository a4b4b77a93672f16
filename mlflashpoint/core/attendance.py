"""Who waits in a round, told only once one takes long, so that the ranks that have not come can be named.

A bit for each rank, in counters of the job's store. A round that all ranks come to soon costs one look of one rank.
"""

from __future__ import annotations

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.deadline import Deadline

#: ranks in one counter, which is a signed number of 64 bits
_BITS = 62
_SIGNED = "signed"


class Attendance:
    """One rank's part in it.

    Args:
        rank: this rank.
        size: number of ranks.
        deadline: longest wait in the round; this rank signs when half of it is over.

    The methods raise PeerError when the store can't be reached.
    """

    def __init__(self, rank: int, size: int, deadline: Deadline) -> None:
        self._rank, self._size, self._deadline = rank, size, deadline
        self._signed = False

    def sign(self, channel: Channel) -> None:
        """Tell that this rank waits, once, if it has waited for long."""
        if self._signed or 2 * self._deadline.remaining_s > self._deadline.seconds:
            return
        # A bit that is added twice is another's: who does not hear an answer does not try again.
        self._signed = True
        channel.add(_SIGNED)
        channel.add(self._keys()[self._rank // _BITS], 1 << self._rank % _BITS)

    def missing(self, channel: Channel) -> list[int]:
        """The ranks that have not signed; they may have come all the same, but not for long."""
        words = [channel.add(key, 0) for key in self._keys()]
        return [rank for rank in range(self._size) if not words[rank // _BITS] >> rank % _BITS & 1]

    def clear(self, channel: Channel) -> None:
        """Take the keys away: all ranks have come."""
        if channel.read(_SIGNED) is not None:
            channel.delete(_SIGNED, *self._keys())

    def _keys(self) -> list[str]:
        return [f"{_SIGNED}/{word}" for word in range(-(-self._size // _BITS))]
