"""What the tests of the timings have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflashpoint.timings.lines import LineSplitter
from mlflashpoint.timings.samples import Sample, TimingSet
from mlflashpoint.timings.scan import WORDS, LogScan

ROOT = Path(__file__).resolve().parents[2]
LOGS = Path(__file__).parent / "logs"
HEADER = "(min, max) time across ranks (ms):"


def block(least: float, most: float, timer: str = "save-checkpoint", header: str = HEADER) -> str:
    """A timer block as Megatron prints it; milliseconds."""
    return f"{header}\n    {(timer + ' ').ljust(48, '.')}: ({least:.2f}, {most:.2f})\n"


def iteration(step: int, total: int = 100) -> str:
    return f" [2026-01-01 00:00:00] iteration {step:8d}/{total:8d} | consumed samples: {step * 4:12d} |\n"


def save_line(rank: int, step: int, blocking_ms: float, /, **changed: object) -> str:
    """A save record of ours as the logger prints it."""
    fields = {
        "blocking_ms": blocking_ms,
        "bytes": 1 << 20,
        "group": "default",
        "incarnation": 1,
        "ok": True,
        "rank": rank,
        "seq": step,
        "skipped": False,
        "step": step,
        **changed,
    }
    return f"INFO mlflashpoint save {json.dumps(fields, sort_keys=True)}\n"


def scan(text: str | bytes, chunk: int = 1 << 20) -> LogScan:
    """A scan of a whole log, fed in chunks of the given size."""
    data = text.encode() if isinstance(text, str) else text
    result, splitter = LogScan(), LineSplitter(WORDS)
    for start in range(0, len(data), chunk):
        result.feed(splitter.feed(data[start : start + chunk]))
    result.feed(splitter.finish())
    result.finish()
    return result


def found(result: LogScan) -> list[tuple[str, int | None, float]]:
    """``(timer, step, milliseconds)`` of every sample, in the order of the log."""
    rows = [(save.order, save.timer, save.step, save.seconds) for save in result.block_saves]
    rows += [(save.order, timer, save.step, save.seconds) for timer, save in result.ranked.items()]
    return [(timer, step, round(seconds * 1e3, 3)) for _, timer, step, seconds in sorted(rows)]


def timing_set(label: str, timers: dict[str, Iterable[float]], **changed: object) -> TimingSet:
    """Samples in seconds, one run, a save every five steps."""
    return TimingSet(
        label,
        {
            timer: tuple(Sample(value, 0, order, (order + 1) * 5) for order, value in enumerate(values))
            for timer, values in timers.items()
        },
        **changed,  # type: ignore[arg-type]
    )


def mlflashpoint(
    *arguments: object, cwd: Path, stdin: bytes = b"", env: dict[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mlflashpoint.cli", *map(str, arguments)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        timeout=timeout,
        env=environ(env),
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def environ(changed: dict[str, str] | None = None) -> dict[str, str]:
    """This environment without settings of ours, with the source tree on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLASHPOINT_")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(changed or {})}


def parsed(tmp_path: Path, label: str, logs: Sequence[str]) -> TimingSet:
    from mlflashpoint.timings.parser import parse

    paths = []
    for number, text in enumerate(logs):
        path = tmp_path / f"{label}{number}.log"
        path.write_text(text)
        paths.append(str(path))
    return parse(label, paths)
