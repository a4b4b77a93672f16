"""What the tests of one process's store share: exact comparison of states, and saving one in two lines."""

import math
import struct

import torch

from mlflashpoint.core.arena import Arena
from mlflashpoint.core.saver import ShardSaver

FIELDS = {"job_id": "job", "group": "default", "incarnation": 1, "rank": 0, "world_size": 1}


def differences(left, right, at="state"):
    """Every way in which two states differ: types, order, values to the bit, and what tensors are; [] if in none."""
    if type(left) is not type(right) and not (isinstance(left, tuple) and getattr(left, "_fields", None)):
        return [f"{at}: {type(left).__name__} is no {type(right).__name__}"]
    if isinstance(left, torch.Tensor):
        return _tensor_differences(left, right, at)
    if isinstance(left, dict):
        if [(type(key), key) for key in left] != [(type(key), key) for key in right]:
            return [f"{at}: keys {list(left)} are not {list(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{at}[{key!r}]")]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [f"{at}: {len(left)} entries are not {len(right)}"]
        pairs = enumerate(zip(left, right, strict=True))
        return [found for place, (a, b) in pairs for found in differences(a, b, f"{at}[{place}]")]
    if isinstance(left, float):
        return [] if struct.pack(">d", left) == struct.pack(">d", right) else [f"{at}: {left} is not {right}"]
    if isinstance(left, complex):
        return differences((left.real, left.imag), (right.real, right.imag), at)
    return [] if left == right else [f"{at}: {left!r} is not {right!r}"]


def _tensor_differences(left, right, at):
    facts = [(t.dtype, t.shape, t.layout, t.requires_grad) for t in (left, right)]
    if facts[0] != facts[1]:
        return [f"{at}: {facts[0]} is not {facts[1]}"]
    if left.layout is not torch.strided:
        left, right = left.detach(), right.detach()
        return [] if torch.equal(left.to_dense(), right.to_dense()) else [f"{at}: sparse content differs"]
    return [] if bits(left) == bits(right) else [f"{at}: bits differ"]


def bits(tensor):
    """The elements as bytes, in the order of their indices."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if math.prod(plain.shape) else b""


def save(seat, state, *, step=1, slot=0, count=2, saver=None, arena=None, **attributes):
    """Save ``state`` into a slot of the seat; returns the arena and the record."""
    saver = saver or ShardSaver()
    if arena is None:
        arena = Arena(seat)
        arena.adopt()
    arena.reserve(count, saver.size_of(state))
    staged = saver.stage(arena.slots[slot], state, attributes=attributes)
    return arena, saver.commit(staged, step=step, **FIELDS)
