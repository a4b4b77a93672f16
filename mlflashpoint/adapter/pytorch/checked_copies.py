"""Copying out of stored tensors, with the digest of every tensor that is read.

Whoever found the version has checked it, but some time ago, and not on each rank. A digest costs a second pass over the
memory; taken of each portion right after it was copied, it meets it in the processor's cache and costs little.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlflashpoint.adapter.pytorch.copies import is_plain, on_host
from mlflashpoint.core.copying import in_two_threads
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.shard import digest_of, new_digest

#: bytes that are copied before their digest is taken, of one tensor or of many: less than a core's own cache
_PORTION = 512 << 10


@dataclass(frozen=True)
class Stored:
    """One stored tensor.

    Attributes:
        reader: of its shard.
        name: in the shard.
    """

    reader: ShardReader
    name: str

    @property
    def nbytes(self) -> int:
        return self.reader.entry(self.name).nbytes

    def view(self) -> Tensor:
        """It, where it lies; valid until the reader is closed."""
        return self.reader.view(self.name)

    def is_intact(self, content: bytes | None = None) -> bool:
        """Whether it, or ``content``, which was copied from it, has the digest that was saved."""
        data = self.reader.raw(self.name) if content is None else content
        return digest_of(data) == self.reader.entry(self.name).digest


@dataclass
class _Read:
    """What is wanted of one stored tensor."""

    stored: Stored
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def is_one_piece(self) -> bool:
        """Whether it is copied whole, in the order in which it lies."""
        target, source = self.pairs[0]
        return (
            len(self.pairs) == 1
            and is_plain(target, source)
            and target.is_contiguous()
            and source.is_contiguous()
            and source.numel() * source.element_size() == self.stored.nbytes
        )

    def copy(self) -> None:
        for target, source in self.pairs:
            target.copy_(source)


class CheckedCopies:
    """The copies of one load, made all at once."""

    def __init__(self) -> None:
        self._reads: dict[Stored, _Read] = {}

    def add(self, stored: Stored, source: Tensor, target: Tensor) -> None:
        """Copy ``source``, which is ``stored`` or a part of it, into the target of the same shape."""
        self._reads.setdefault(stored, _Read(stored)).pairs.append((target, source))

    def run(self) -> list[Stored]:
        """Copy, on the host with two threads; the stored tensors whose bytes are not those that were saved."""
        bad: list[Stored] = []
        reads = list(self._reads.values())
        units = _units(reads, bad)
        if all(on_host(target, source) for read in reads for target, source in read.pairs):
            in_two_threads(units, sum(read.stored.nbytes for read in reads))
        else:
            with torch.no_grad():
                for unit in units:
                    unit()
        return bad


def _units(reads: list[_Read], bad: list[Stored]) -> list[Callable[[], object]]:
    """Portions for one thread's turn, the largest first, so that both threads end at one time."""
    large = sorted((read for read in reads if read.stored.nbytes > _PORTION), key=lambda read: -read.stored.nbytes)
    units: list[Callable[[], object]] = [functools.partial(_one, read, bad) for read in large]
    batch: list[_Read] = []
    waiting = 0
    for read in reads:
        if read.stored.nbytes > _PORTION:
            continue
        batch.append(read)
        waiting += read.stored.nbytes
        if waiting >= _PORTION:
            units.append(functools.partial(_many, batch, bad))
            batch, waiting = [], 0
    if batch:
        units.append(functools.partial(_many, batch, bad))
    return units


def _many(reads: list[_Read], bad: list[Stored]) -> None:
    pairs = [pair for read in reads for pair in read.pairs]
    plain = [pair for pair in pairs if on_host(*pair) and is_plain(*pair)]
    if plain:
        torch._foreach_copy_([target for target, _ in plain], [source for _, source in plain])
    if len(plain) < len(pairs):
        for target, source in pairs:
            if not (on_host(target, source) and is_plain(target, source)):
                target.copy_(source)
    bad += [read.stored for read in reads if not read.stored.is_intact()]


def _one(read: _Read, bad: list[Stored]) -> None:
    stored = read.stored
    if not read.is_one_piece:
        read.copy()
        if not stored.is_intact():
            bad.append(stored)
        return
    ((target, source),) = read.pairs
    to, of, raw = target.detach().view(-1), source.detach().view(-1), stored.reader.raw(stored.name)
    size, digest = source.element_size(), new_digest()
    bounds = [*range(0, of.numel(), _PORTION // size), of.numel()]
    for begin, end in itertools.pairwise(bounds):
        to[begin:end].copy_(of[begin:end])
        digest.update(raw[begin * size : end * size])
    if digest.hexdigest() != stored.reader.entry(stored.name).digest:
        bad.append(stored)
