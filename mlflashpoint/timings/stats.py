"""The statistics of small samples that the comparison needs, without numpy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

RESAMPLES = 2000
#: values up to which every resample draws all of them
FULL_RESAMPLES_TO = 1000
#: of more values, those furthest from the mean that every resample still draws one by one
_TAIL = 200


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def rounded(value: float, digits: int) -> float:
    """``round`` that makes no negative zero, which would be shown with its sign."""
    return round(value, digits) + 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest order statistics (numpy's default)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def variance(values: Sequence[float]) -> float:
    """Unbiased sample variance; needs two values."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def bootstrap_difference(
    one: Sequence[float], other: Sequence[float], *, seed: int, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of ``mean(other) - mean(one)``, None if either has fewer than two values.

    Equal seeds give equal intervals. With fewer than about five values the interval is too narrow. Beyond
    ``FULL_RESAMPLES_TO`` values on a side, see ``_resampled_means``, so that the cost does not grow with them.
    """
    if min(len(one), len(other)) < 2:
        return None
    generator = random.Random(seed)
    after, before = (_resampled_means(values, resamples, generator) for values in (other, one))
    differences = [right - left for right, left in zip(after, before, strict=True)]
    tail = (1 - level) / 2
    return quantile(differences, tail), quantile(differences, 1 - tail)


def _resampled_means(values: Sequence[float], count: int, generator: random.Random) -> list[float]:
    """Means of ``count`` resamples, drawn with replacement.

    Of many values, the ``_TAIL`` furthest from the mean are drawn as they are: how many of a resample's draws hit them
    is binomial, which ones is uniform. The rest has no outlier any more, and the sum of many draws of it is taken to be
    normal, with the rest's own mean and variance.
    """
    n = len(values)
    if n <= FULL_RESAMPLES_TO:
        return [mean(generator.choices(values, k=n)) for _ in range(count)]
    centre = mean(values)
    ordered = sorted(values, key=lambda value: abs(value - centre))
    rest, tail = ordered[:-_TAIL], ordered[-_TAIL:]
    middle = mean(rest)
    deviation = math.sqrt(math.fsum((value - middle) ** 2 for value in rest) / len(rest))
    means = []
    for _ in range(count):
        hits = _binomial(n, _TAIL / n, generator)
        total = math.fsum(generator.choices(tail, k=hits)) + (n - hits) * middle
        means.append((total + generator.gauss(0, 1) * deviation * math.sqrt(n - hits)) / n)
    return means


def _binomial(n: int, share: float, generator: random.Random) -> int:
    """Successes in ``n`` trials, by the gaps between them; takes as many draws as there are successes."""
    scale, place, hits = math.log1p(-share), 0, 0
    while True:
        place += int(math.log(1.0 - generator.random()) / scale) + 1
        if place > n:
            return hits
        hits += 1


def welch_interval(one: Sequence[float], other: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Interval of ``mean(other) - mean(one)`` after Welch, right for few values too; None below two on either side."""
    if min(len(one), len(other)) < 2:
        return None
    shares = variance(one) / len(one), variance(other) / len(other)
    difference, total = mean(other) - mean(one), sum(shares)
    if total == 0:
        return difference, difference
    freedom = total**2 / (shares[0] ** 2 / (len(one) - 1) + shares[1] ** 2 / (len(other) - 1))
    half = student_quantile((1 + level) / 2, freedom) * math.sqrt(total)
    return difference - half, difference + half


def student_quantile(share: float, freedom: float) -> float:
    """Quantile of Student's t distribution for ``0.5 <= share < 1``, by bisection."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < share:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_cdf(t: float, freedom: float) -> float:
    """Distribution function of Student's t for ``t >= 0``."""
    return 1 - _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            result *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return front * result / a
