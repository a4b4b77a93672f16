"""What the messages between two Mooncake transports carry, checked as they come in."""

from __future__ import annotations

import base64
import binascii
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from mlflashpoint.errors import PeerError, ReplicationError
from mlflashpoint.replication.deadline import Deadline

Replies = queue.SimpleQueue[Mapping[str, Any]]


def hear(replies: Replies, peer: int, deadline: Deadline) -> Mapping[str, Any]:
    """The next reply; raises PeerError or ReplicationError if it is a refusal, DeadlineExceededError if none comes."""
    try:
        message = replies.get(timeout=max(0.001, deadline.remaining_s))
    except queue.Empty:
        raise deadline.exceeded(f"answer from rank {peer}", rank=peer) from None
    if message.get("ok") is True:
        return message
    kind = PeerError if message.get("refused") else ReplicationError
    raise kind(f"rank {peer} refused: {message.get('error')}", rank=peer)


def header_of(message: Mapping[str, Any], peer: int) -> bytes:
    """The shard's header; raises PeerError if it is malformed."""
    try:
        return base64.b64decode(str(message.get("header", "")), validate=True)
    except binascii.Error:
        raise PeerError(f"rank {peer} sent a malformed header", rank=peer) from None


def addresses_of(message: Mapping[str, Any], count: int, peer: int) -> list[int]:
    """``count`` addresses; raises PeerError if they are malformed."""
    addresses = message.get("addresses")
    if not isinstance(addresses, list) or len(addresses) != count or any(type(a) is not int for a in addresses):
        raise PeerError(f"rank {peer} sent malformed addresses", rank=peer)
    return addresses


def part(
    buffers: Sequence[memoryview], addresses: Sequence[int], offset: Any, length: Any
) -> tuple[list[memoryview], list[int]]:
    """The parts of the buffers in the range, and where they go; raises ReplicationError if there is no such range."""
    total = sum(map(len, buffers))
    if not (type(offset) is int and type(length) is int and 0 <= offset <= offset + length <= total):
        raise ReplicationError(f"there are no bytes [{offset}, {offset} + {length})")
    views, where, end = [], [], offset + length
    for buffer, address in zip(buffers, addresses, strict=True):
        low, high = max(0, offset), min(len(buffer), end)
        if low < high:
            views.append(buffer[low:high])
            where.append(address + low)
        offset, end = offset - len(buffer), end - len(buffer)
    return views, where
