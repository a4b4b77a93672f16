"""What holds for any log."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.lines import LineSplitter
from mlflashpoint.timings.samples import TimingSet
from mlflashpoint.timings.scan import LogScan
from tests.timings.helpers import LOGS, block, found, iteration, save_line, scan

# hypothesis would time the examples; this machine can be busy
_EXAMPLES = settings(deadline=None, max_examples=100)

_PIECES = [
    line + b"\n"
    for name in ("core-0.19.2-all.log", "core-0.19.2-minmax.log", "megatron-lm-2.6.log", "nemo-2.7.3.log", "ray.log")
    for line in (LOGS / name).read_bytes().splitlines()
] + [
    "• checkpointing: 1.25s\n".encode(),
    b"\r",
    b"[default0]:",
    b'{"log":"',
    b"\x1b[32m",
    b"mlflashpoint save {",
    b"\x00",
]


@_EXAMPLES
@given(st.binary(max_size=4000), st.integers(1, 100))
def test_no_bytes_make_the_parser_fail(data: bytes, chunk: int) -> None:
    scan(data, chunk)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.sampled_from(_PIECES), st.binary(max_size=30)), max_size=60), st.data())
def test_no_mixture_of_real_lines_makes_the_parser_fail(pieces: list[bytes], data: st.DataObject) -> None:
    log = b"".join(pieces)
    start = data.draw(st.integers(0, len(log)))
    stop = data.draw(st.integers(start, len(log)))
    torn = log[:start] + log[stop:]
    for _, _, milliseconds in found(scan(torn, data.draw(st.integers(1, 200)))):
        assert milliseconds >= 0


@_EXAMPLES
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 6))
def test_the_order_of_the_ranks_lines_does_not_matter(shuffle: random.Random, ranks: int, saves: int) -> None:
    lines = [save_line(rank, step, shuffle.uniform(0, 500)) for rank in range(ranks) for step in range(1, saves + 1)]
    expected = sorted(found(scan("".join(lines))))
    assert len(expected) == saves
    repeated = lines + shuffle.choices(lines, k=len(lines))
    shuffle.shuffle(repeated)
    assert sorted(found(scan("".join(repeated)))) == expected


@_EXAMPLES
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_ranks_can_be_interleaved_in_any_way(shuffle: random.Random, saves: int) -> None:
    """Each rank's own lines stay in order, as pipes keep them; blocks of the last rank are among them."""
    own = [[save_line(rank, step, 10.0 * step + rank) for step in range(1, saves + 1)] for rank in range(3)]
    last = [iteration(step) + block(10 * step, 12 * step) for step in range(1, saves + 1)]
    queues = [list(queue) for queue in (*own, last)]
    log = ""
    while any(queues):
        log += shuffle.choice([queue for queue in queues if queue]).pop(0)
    assert sorted(found(scan(log))) == sorted(
        [("flashpoint-save", step, 10.0 * step + 2) for step in range(1, saves + 1)]
        + [("save-checkpoint", step, 12.0 * step) for step in range(1, saves + 1)]
    )


@_EXAMPLES
@given(st.text(max_size=300))
def test_no_text_makes_the_reader_of_results_fail_otherwise_than_named(text: str) -> None:
    try:
        TimingSet.from_json(text)
    except TimingsError as error:
        assert "\n" not in str(error)
    else:
        raise AssertionError("that was no result")


_BEHIND = st.sampled_from(
    ["", " ", "\t ", "\x1b[0m", " \x1b[0m", "\x07", "\u00a0", "é", " [repeated 2x across cluster]"]
)


@_EXAMPLES
@given(st.lists(st.tuples(st.sampled_from(_PIECES), _BEHIND, st.booleans()), max_size=40))
def test_nothing_that_can_be_read_is_passed_over(pieces: list[tuple[bytes, str, bool]]) -> None:
    lines = []
    for piece, behind, docker in pieces:
        line = piece.rstrip(b"\n") + behind.encode()
        lines.append(json.dumps({"log": line.decode("utf-8", "replace") + "\n"}).encode() if docker else line)
    log = b"\n".join(lines) + b"\n"
    whole, splitter = LogScan(), LineSplitter()
    whole.feed(splitter.feed(log))
    whole.finish()
    assert found(scan(log)) == found(whole)
