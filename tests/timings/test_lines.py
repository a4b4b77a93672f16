from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.lines import MAX_LINE_BYTES, LineSplitter, chunks
from tests.timings.helpers import block, environ, iteration


def _split(*pieces: bytes, words: tuple[bytes, ...] = ()) -> list[bytes]:
    splitter = LineSplitter(words)
    return [line for piece in pieces for line in splitter.feed(piece)] + list(splitter.finish())


def test_a_line_can_arrive_in_pieces() -> None:
    assert _split(b"one\ntw", b"o", b"\nthree") == [b"one", b"two", b"three"]


def test_a_carriage_return_ends_a_line() -> None:
    assert _split(b"10%|#    |\r20%|##   |\rdone\r\n") == [b"10%|#    |", b"20%|##   |", b"done"]


def test_only_lines_with_a_word_are_given_out_and_all_are_counted() -> None:
    splitter = LineSplitter((b"save", b":\n"))
    data = b"a\nsave and save\nb\nname:\nc\nsave"
    lines = [line for start in range(len(data)) for line in splitter.feed(data[start : start + 1])]
    assert [*lines, *splitter.finish()] == [b"save and save", b"name:", b"save"]
    assert splitter.lines == 6


def test_a_word_that_ends_with_the_line_is_found_at_the_end_of_the_log() -> None:
    assert _split(b"x\nname:", words=(b":\n",)) == [b"name:"]


def test_an_endless_line_is_cut_and_counted_once() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(50) for line in splitter.feed(b"x" * 10_000)]
    assert lines == []
    assert [len(line) for line in splitter.feed(b"x\nnext\n")] == [MAX_LINE_BYTES, 4]
    assert splitter.overlong == 1


def test_a_long_line_within_a_chunk_is_cut_too() -> None:
    splitter = LineSplitter()
    assert [len(line) for line in splitter.feed(b"y" * 200_000 + b"\nz\n")] == [MAX_LINE_BYTES, 1]
    assert splitter.overlong == 1


def test_gzip_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "named-plain.log"
    path.write_bytes(gzip.compress(b"hello\n" * 100_000))
    assert b"".join(chunks(str(path))) == b"hello\n" * 100_000


def test_a_cut_gzip_file_is_refused_with_a_way_to_read_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.log.gz"
    whole = gzip.compress(bytes(range(256)) * 1000)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TimingsError, match=r"damaged gzip.*zcat"):
        list(chunks(str(path)))


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="a folder is no log"):
        list(chunks(str(tmp_path)))


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match=r"No such file.*gone\.log"):
        list(chunks(str(tmp_path / "gone.log")))


def test_a_large_log_is_read_in_constant_memory(tmp_path: Path) -> None:
    """96 MiB without a line end, then as much in lines, in 96 MiB of address space."""
    log = tmp_path / "large.log"
    filler = b"[default3]: 2026-01-01 some.module DEBUG decoder.layers.12.mlp.linear_fc1.weight shape=(4096, 16384)\n"
    with open(log, "wb") as file:
        file.truncate(96 << 20)  # a sparse file: zeros without a line end
        file.seek(0, 2)
        file.write(b"\n")
        for step in range(1, 6):
            file.write(iteration(step).encode() + block(10 * step, 10 * step + 1).encode())
            file.write(filler * 200_000)
    assert log.stat().st_size > 190 << 20
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (96 << 20, {resource.RLIM_INFINITY}))
from mlflashpoint.timings.parser import parse
samples = parse("x", [{str(log)!r}]).timers["save-checkpoint"]
print([(sample.step, sample.seconds) for sample in samples])
"""
    done = subprocess.run([sys.executable, "-c", program], env=environ(), capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "[(1, 0.011), (2, 0.021), (3, 0.031), (4, 0.041), (5, 0.051)]\n"
