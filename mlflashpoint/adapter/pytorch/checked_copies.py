"""Copying out of stored tensors, with the digest of every tensor that nobody in this process has just compared.

A digest costs a second pass over the memory; taken of each portion right after it was copied, it meets it in the
processor's cache. That is still half as much again as the copy, so a load that follows on the search for its version,
which has compared them all, does not do it again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mlflashpoint.adapter.pytorch.copies import copy_all, is_plain
from mlflashpoint.core.copying import in_two_threads
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.shard import TensorEntry, digest_of, new_digest

#: seconds for which the digests of a shard count as compared
TRUST_S = 30.0
#: bytes that are copied before their digest is taken, of one tensor or of many: less than a core's own cache
_PORTION = 512 << 10


class Stored:
    """One stored tensor; as a key it is equal to itself alone.

    Attributes:
        reader: of its shard.
        entry: what the shard says of it.
    """

    __slots__ = ("entry", "reader")

    def __init__(self, reader: ShardReader, entry: TensorEntry) -> None:
        self.reader = reader
        self.entry = entry

    def view(self) -> Tensor:
        """It, where it lies; valid until the reader is closed."""
        return self.reader.view(self.entry.name)

    def is_intact(self, content: bytes | None = None) -> bool:
        """Whether it, or ``content``, which was copied from it, has the digest that was saved."""
        return digest_of(self.reader.raw(self.entry) if content is None else content) == self.entry.digest


#: target and source
_Pair = tuple[Tensor, Tensor]


class CheckedCopies:
    """The copies of one load, made all at once."""

    def __init__(self) -> None:
        self._plain: dict[Stored, list[_Pair]] = {}
        self._odd: dict[Stored, list[_Pair]] = {}
        self._on_host = True
        self._trusted: dict[ShardReader, bool] = {}
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, stored: Stored, source: Tensor, target: Tensor) -> None:
        """Copy ``source``, which is ``stored`` or a part of it, into the target of the same shape."""
        trusted = self._trusted.get(stored.reader)
        if trusted is None:
            trusted = self._trusted[stored.reader] = stored.reader.verified_within(TRUST_S)
        if trusted:
            self._targets.append(target)
            self._sources.append(source)
            return
        on_host = target.is_cpu
        self._on_host &= on_host
        wanted = self._plain if on_host and is_plain(target, source) else self._odd
        pairs = wanted.get(stored)
        if pairs is None:
            wanted[stored] = [(target, source)]
        else:
            pairs.append((target, source))

    def run(self) -> list[Stored]:
        """Copy, on the host with two threads; the stored tensors whose bytes are not those that were saved."""
        copy_all(self._targets, self._sources)
        bad: list[Stored] = []
        units = _units(self._plain, bad)
        units += [functools.partial(_one, stored, pairs, bad) for stored, pairs in self._odd.items()]
        if self._on_host:
            in_two_threads(units, sum(stored.entry.nbytes for wanted in (self._plain, self._odd) for stored in wanted))
        else:
            with torch.no_grad():
                for unit in units:
                    unit()
        return bad


def _units(reads: Mapping[Stored, list[_Pair]], bad: list[Stored]) -> list[Callable[[], object]]:
    """Portions for one thread's turn, the largest first, so that both threads end at one time."""
    large: list[Stored] = []
    batches: list[list[Stored]] = [[]]
    waiting = 0
    for stored in reads:
        nbytes = stored.entry.nbytes
        if nbytes > _PORTION:
            large.append(stored)
            continue
        if waiting + nbytes > _PORTION:
            batches.append([])
            waiting = 0
        batches[-1].append(stored)
        waiting += nbytes
    large.sort(key=lambda stored: -stored.entry.nbytes)
    units: list[Callable[[], object]] = [functools.partial(_one, stored, reads[stored], bad) for stored in large]
    return units + [functools.partial(_many, batch, reads, bad) for batch in batches if batch]


def _many(batch: list[Stored], reads: Mapping[Stored, list[_Pair]], bad: list[Stored]) -> None:
    targets, sources = zip(*(pair for stored in batch for pair in reads[stored]), strict=True)
    torch._foreach_copy_(targets, sources)
    bad += [stored for stored in batch if not stored.is_intact()]


def _one(stored: Stored, pairs: list[_Pair], bad: list[Stored]) -> None:
    target, source = pairs[0]
    size = source.element_size()
    one_piece = (
        len(pairs) == 1
        and source.numel() * size == stored.entry.nbytes
        and source.is_contiguous()
        and target.is_contiguous()
        and is_plain(target, source)
    )
    if not one_piece:
        for target, source in pairs:
            target.copy_(source)
        if not stored.is_intact():
            bad.append(stored)
        return
    to, of, raw = target.detach().view(-1), source.detach().view(-1), stored.reader.raw(stored.entry)
    digest = new_digest()
    for begin, end in itertools.pairwise([*range(0, of.numel(), _PORTION // size), of.numel()]):
        to[begin:end].copy_(of[begin:end])
        digest.update(raw[begin * size : end * size])
    if digest.hexdigest() != stored.entry.digest:
        bad.append(stored)
