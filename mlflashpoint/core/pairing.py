"""Which stored tensor goes into which tensor of a state to load into, checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlflashpoint.core.copying import Schedule
from mlflashpoint.core.flatten import Flat
from mlflashpoint.core.form import Form
from mlflashpoint.core.paths import tensor_names
from mlflashpoint.core.shard import ShardIndex, TensorEntry, is_dense
from mlflashpoint.core.skeleton import Skeleton
from mlflashpoint.errors import StateMismatchError

_SHOWN = 5


@dataclass(frozen=True)
class Pairing:
    """How to load one shard into states of one form.

    Attributes:
        form: of those states.
        strict: see ``pair``.
        wanted, stored: number of the state's tensor, and of the stored one that goes into it.
        kept: for each stored tensor the state's tensor that stands for it, -1 if it has none.
        schedule: how to copy, if all are on the CPU.
        straight: whether each tensor goes into the state's tensor of the same number, and there are no others.
        alike: whether, besides, the state has the structure that was stored, and ties nothing.
    """

    form: Form
    strict: bool
    wanted: list[int]
    stored: list[int]
    kept: list[int]
    schedule: Schedule
    straight: bool
    alike: bool


def pair(index: ShardIndex, flat: Flat, *, strict: bool, where: Mapping[str, Any]) -> Pairing:
    """Pair by place in the state; the order of a dictionary's keys does not matter.

    Args:
        index: of the shard.
        flat: the state to load into.
        strict: whether a tensor that only one side has is an error.
        where: rank, step and path for the error.

    Raises:
        StateMismatchError: they differ in places, shapes or dtypes, or the state ties what was stored as two; names the
            first five differences.
    """
    problems: list[str] = []
    same = flat.skeleton.same_structure(index.skeleton)
    if same:
        pairs = [(number, number) for number in range(len(index.tensors))]
    else:
        stored, wanted = _first_numbers(index.skeleton), _first_numbers(flat.skeleton)
        pairs = list(dict.fromkeys((wanted[name], stored[name]) for name in wanted if name in stored))
        if strict:
            problems += [f"{name}: not stored" for name in wanted if name not in stored]
            problems += [f"{name}: stored, not wanted" for name in stored if name not in wanted]
    kept = [-1] * len(index.tensors)
    sole: dict[int, TensorEntry] = {}
    for at, number in pairs:
        entry, target = index.tensors[number], flat.tensors[at]
        if (entry.dtype, entry.shape) != (target.dtype, target.shape):
            here, there = described(entry.dtype, entry.shape), described(target.dtype, target.shape)
            problems.append(f"{entry.name}: stored {here}, wanted {there}")
        elif target.is_inference() or _overlaps_itself(target):
            kind = "an inference" if target.is_inference() else "an expanded"
            problems.append(f"{entry.name}: wanted as {kind} tensor, which can't be written to")
        elif sole.setdefault(at, entry).digest != entry.digest:
            problems.append(f"{entry.name}: wanted as one tensor with {sole[at].name}, stored as another")
        elif kept[number] < 0:
            kept[number] = at
    if problems:
        raise StateMismatchError(
            f"{len(problems)} tensors differ: {'; '.join(problems[:_SHOWN])}{'; ...' * (len(problems) > _SHOWN)}",
            remedy="resume with the model and parallel layout that saved it",
            **where,
        )
    chosen = [index.tensors[number] for _, number in pairs]
    flipped = flat.flipped()
    raw = [
        not flipped[at] and _stride_of(flat.tensors[at]) == entry.stride
        for (at, _), entry in zip(pairs, chosen, strict=True)
    ]
    straight = kept == list(range(len(flat.tensors))) and pairs == list(zip(kept, kept, strict=True))
    return Pairing(
        form=flat.form,
        strict=strict,
        wanted=[at for at, _ in pairs],
        stored=[number for _, number in pairs],
        kept=kept,
        schedule=Schedule([entry.nbytes for entry in chosen], raw),
        straight=straight,
        alike=straight and same and len(flat.skeleton.refs) == len(flat.tensors),
    )


def overlaps(flat: Flat, wanted: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of tensors of a state that share some memory, each dense: places in ``wanted``, and how much later the
    second one begins, in bytes. Strided views are passed over: those of one memory mostly lie between each other.
    """
    spans = []
    for place, at in enumerate(wanted):
        tensor = flat.tensors[at]
        if tensor.numel() and is_dense(tensor.shape, tensor.stride()):
            spans.append((flat.addresses[at], tensor.numel() * tensor.itemsize, place))
    spans.sort()
    reaching: list[tuple[int, int, int]] = []
    for begin, nbytes, place in spans:
        reaching = [span for span in reaching if span[0] + span[1] > begin]
        for other, _, before in reaching:
            yield before, place, begin - other
        reaching.append((begin, nbytes, place))


def _stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    return None if tensor.is_contiguous() else tensor.stride()


def _overlaps_itself(tensor: Tensor) -> bool:
    return any(step == 0 and extent > 1 for step, extent in zip(tensor.stride(), tensor.shape, strict=True))


def described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """For example ``bfloat16[4, 8]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _first_numbers(skeleton: Skeleton) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, ref in zip(tensor_names(skeleton.tokens, skeleton.keys), skeleton.refs, strict=True):
        found.setdefault(name, ref)
    return found
