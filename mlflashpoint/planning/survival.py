"""The odds that some nodes fail together and take every copy of some shard with them: exact, for the actual topology.

A *fatal set* is a set of nodes that holds all copies of one shard: its owner's node and its holders'. Memory recovery
is lost if and only if the failed nodes include a fatal set. So the harmless choices of ``f`` nodes are counted.

The fatal sets fall into components that share no node. The counts of each component form a polynomial (how many
harmless choices of 0, 1, 2, ... of its nodes), and the polynomials multiply. In the ring of `replication.topology` a
component is a cycle of ``n`` nodes whose fatal sets are the runs of ``s = replicas + 1`` neighbours. Harmless choices
of ``f`` nodes of a cycle, with no ``s`` neighbours in a row, number ``n / (n - f)`` times the coefficient of ``x^f`` in
``(1 + x + ... + x^(s-1))^(n-f)``. With one replica that is ``n / (n - f) * C(n - f, f)``.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

_LARGEST_ENUMERATED = 16
_SAMPLES = 20_000


@dataclass(frozen=True)
class Loss:
    """Probability that memory recovery is lost.

    Attributes:
        probability: between 0 and 1.
        standard_error: 0 if ``probability`` is exact; otherwise it was estimated from random choices.
    """

    probability: float
    standard_error: float = 0.0


class Survival:
    """The fatal sets of one placement.

    Args:
        holders: rank -> ranks that keep its replicas, as `ReplicaMap.holders`.
        place_of: rank -> what fails as one: its node, or its failure domain.
    """

    def __init__(self, holders: Mapping[int, Sequence[int]], place_of: Mapping[int, str]) -> None:
        names = sorted(set(place_of.values()))
        number = {name: index for index, name in enumerate(names)}
        at = {rank: number[name] for rank, name in place_of.items()}
        self.places = len(names)
        self.fatal = {frozenset((at[rank], *(at[holder] for holder in held))) for rank, held in holders.items()}
        self._next = {at[rank]: at[held[0]] for rank, held in holders.items() if held}
        self._of_place: dict[int, list[frozenset[int]]] = defaultdict(list)
        for fatal in self.fatal:
            for place in fatal:
                self._of_place[place].append(fatal)

    def lost(self, failed: Sequence[int]) -> bool:
        """Whether the failed places, by number, include a fatal set."""
        gone = set(failed)
        return any(fatal <= gone for place in gone for fatal in self._of_place[place])

    def loss(self, failures: int) -> Loss:
        """Probability that ``failures`` random places that fail together lose memory recovery."""
        if not 0 <= failures <= self.places:
            raise ValueError(f"{failures} of {self.places} places can't fail")
        counts: Counter[tuple[int, ...]] = Counter()
        for component in self._components():
            counted = self._count(component, failures)
            if counted is None:
                return self._estimate(failures)
            counts[counted] += 1
        harmless = [1]
        for polynomial, times in counts.items():
            harmless = _times(harmless, _power(polynomial, times, failures), failures)
        good = harmless[failures] if failures < len(harmless) else 0
        return Loss(float(1 - Fraction(good, math.comb(self.places, failures))))

    def _components(self) -> list[list[int]]:
        seen: set[int] = set()
        components = []
        for start in range(self.places):
            if start in seen:
                continue
            seen.add(start)
            component, frontier = [start], [start]
            while frontier:
                for fatal in self._of_place[frontier.pop()]:
                    fresh = fatal - seen
                    seen |= fresh
                    component += fresh
                    frontier += fresh
            components.append(component)
        return components

    def _count(self, component: Sequence[int], most: int) -> tuple[int, ...] | None:
        """Harmless choices of 0, 1, ... of the component's places; None if they can't be counted."""
        size = len(component)
        run = self._cycle(component)
        if run is not None:
            return tuple(_harmless_in_cycle(size, run, chosen) for chosen in range(min(size, most) + 1))
        if size > _LARGEST_ENUMERATED:
            return None
        bit = {place: 1 << index for index, place in enumerate(component)}
        fatal = {sum(bit[place] for place in one) for place in component for one in self._of_place[place]}
        counted = [0] * (size + 1)
        for choice in range(1 << size):
            if not any(choice & one == one for one in fatal):
                counted[bin(choice).count("1")] += 1
        return tuple(counted[: most + 1])

    def _cycle(self, component: Sequence[int]) -> int | None:
        """Length of the runs, if the component's fatal sets are exactly the runs of a cycle through it."""
        order = [component[0]]
        while len(order) <= len(component):
            following = self._next.get(order[-1])
            if following is None or following == order[0]:
                break
            order.append(following)
        if len(order) != len(component):
            return None
        fatal = {one for place in component for one in self._of_place[place]}
        run = len(next(iter(fatal), ()))
        twice = order + order
        runs = {frozenset(twice[start : start + run]) for start in range(len(order))}
        return run if run and runs == fatal else None

    def _estimate(self, failures: int) -> Loss:
        # Seeded, so that the same question has the same answer.
        rng = random.Random(failures)
        lost = sum(self.lost(rng.sample(range(self.places), failures)) for _ in range(_SAMPLES))
        share = lost / _SAMPLES
        return Loss(share, math.sqrt(max(share * (1 - share), 1 / _SAMPLES) / _SAMPLES))


def _harmless_in_cycle(size: int, run: int, chosen: int) -> int:
    """Choices of ``chosen`` places of a cycle of ``size``, no ``run`` of which are neighbours in a row."""
    if chosen >= size:
        return int(size == 0)
    gaps = size - chosen
    ways: int = sum(
        (-1) ** j * math.comb(gaps, j) * math.comb(chosen - j * run + gaps - 1, chosen - j * run)
        for j in range(chosen // run + 1)
    )
    return size * ways // gaps


def _times(left: Sequence[int], right: Sequence[int], most: int) -> list[int]:
    product = [0] * min(len(left) + len(right) - 1, most + 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: most + 1 - i]):
            product[i + j] += a * b
    return product


def _power(polynomial: Sequence[int], times: int, most: int) -> list[int]:
    result, base = [1], list(polynomial)
    while times:
        if times & 1:
            result = _times(result, base, most)
        base = _times(base, base, most)
        times >>= 1
    return result
