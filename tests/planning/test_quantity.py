"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest

from mlflashpoint.planning.quantity import parse_bytes, show_bytes, show_probability, show_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("1.5 TB", 1.5e12),
        ("25GB/s", 25e9),
        ("200Gbit/s", 25e9),
        ("200Gbps", 25e9),
        ("512", 512),
        ("1e9", 1e9),
        ("3 kib", 3072),
    ],
)
def test_sizes_and_rates_are_read_with_their_units(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "1..2G", "12 parsecs", "nan", "inf", "1e999", "0x10", "5 GiB GiB"]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="80GiB"):
        parse_bytes(text)


def test_values_are_shown_in_units_that_people_read():
    assert [show_bytes(v) for v in (0, 1023, 1536, 20 * 2**30)] == ["0 B", "1023 B", "1.50 KiB", "20.00 GiB"]
    assert [show_seconds(v) for v in (0.0123, 4.5, 720, 11000, 900000)] == [
        "12.3 ms",
        "4.5 s",
        "12 min",
        "3.06 h",
        "10.4 d",
    ]
    assert [show_probability(v) for v in (0, 1.23e-5, 0.0128, 1)] == ["0", "1.2e-05", "0.013", "1"]
