"""Sizes, rates and durations as people write them."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1.0,
    "b": 1.0,
    **{prefix + "b": 1000.0**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "ib": 1024.0**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix: 1024.0**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "bit": 1000.0**power / 8 for power, prefix in enumerate("kmgtp", start=1)},
}


def parse_bytes(text: str) -> float:
    """Bytes, or bytes per second: ``80GiB``, ``80G`` (the same), ``25GB/s``, ``200Gbit/s``, ``1e9``.

    Raises:
        ValueError: it is not a positive number with a known unit; says what is understood.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    unit = "" if match is None else match[2].replace("bps", "bit")
    try:
        number = float(match[1]) if match is not None else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf or unit not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 80GiB, 25GB/s or 200Gbit/s")
    return number * _UNITS[unit]


def show_bytes(value: float) -> str:
    """A size for people: ``1.50 GiB``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units) - 1, max(0, int(math.log(max(value, 1.0), 1024))))
    return f"{value / 1024**power:.{0 if power == 0 else 2}f} {units[power]}"


def show_seconds(value: float) -> str:
    """A duration for people: ``12.3 ms``, ``4.5 s``, ``12.0 min``, ``3.1 h``."""
    for limit, scale, unit in ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"), (172800.0, 1 / 3600, "h")):
        if value < limit:
            return f"{value * scale:.3g} {unit}"
    return f"{value / 86400:.3g} d"


def show_probability(value: float) -> str:
    """A probability for people: ``0``, ``1.2e-05``, ``0.013``, ``1``."""
    return "0" if value == 0 else f"{value:.2g}"
