"""What memory checkpoints cost a Lightning job, each figure against a yardstick measured in the same run.

    python -m benchmarks.lightning [--rounds 9] [--pairs 30] [--blocks 20] [--states llm,small] [--package NAME]
                                   [--only blocking,hooks,overhead] [--allocator fixed|default] [--json FILE]

Blocking: one process, one fit; in turn a step saves to memory and the next one calls Lightning's own
``Trainer.save_checkpoint`` to tmpfs. What counts is how long the training stands still, from capturing the state on.
Hooks: in one process, the callback hooks that Lightning calls at each step, in turn with our callback, with an empty
one, and with none; no save is due.
Overhead: the time from one batch's start to the next with no save due. A process differs from its like for as long as
it lives, so each block starts new ones, with the agent, without it, a second one without it (the control), and one
without it whose recipe has an empty callback of Lightning's, lets them fit in turn, and gives one difference of medians
to the process without it. Which two are "without" and control is nothing but a name, and the order turns, so the
control's mean is 0 but for chance. What counts is the interval over the blocks. At a step of some milliseconds the
agent's lower end may not be above 0 by more than half the width of the control's (the noise); at one of less than a
millisecond, where an empty callback can be measured, the agent may not take longer than that by more than the noise.
glibc gives freed memory back to the kernel or not by where in its heap it happens to lie, which any import changes: a
step then takes page faults that another process does not. So its thresholds are fixed in all processes of this part;
``--allocator default`` leaves them as they are.
The exit code is 1 if a promise is missed, or a control that is not around 0 leaves it open. Needs
``tools/envs/lightning.sh``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflashpoint.timings.stats import student_quantile

ROOT = Path(__file__).resolve().parents[1]
OVERLAYS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
#: Lightning's own save to tmpfs takes at least this many times as long
PROMISE = 5.0
#: what our callback adds to a step is at most this many times what an empty one of Lightning's adds
PROMISE_HOOKS = 1.5
#: width of the model -> steps of one fit
WIDTHS = {64: 300, 1024: 60}
#: shortest step, in microseconds, at which the agent as a whole is promised to be within noise
LONG_STEP_US = 2000.0
#: bytes: the most that glibc takes for the first, and more than a fit ever frees
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
#: fits of each process in a block, behind one that warms it up
TURNS = 3


class Worker:
    """A warm process that fits on request; the agent is there if ``base`` is."""

    def __init__(self, package: str, base: Path | None, environment: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="benchmark-lightning-"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLASHPOINT_")}
        path = f"{ROOT / '.envs' / 'lightning' / OVERLAYS[package]}:{ROOT}"
        environ.update(PYTHONPATH=path, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", **(environment or {}))
        command = [
            sys.executable,
            *(["-m", "mlflashpoint.run"] if base else []),
            "-m",
            "benchmarks.lightning_fits",
            package,
        ]
        if base is not None:
            environ.update(
                MLFLASHPOINT_ENABLED="1",
                MLFLASHPOINT_JOB_ID="benchmark",
                MLFLASHPOINT_BASE_CONTAINER=str(base),
                MLFLASHPOINT_LOG_LEVEL="WARNING",
            )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            cwd=self.folder,
            text=True,
        )

    def ask(self, **job: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the worker died")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


def blocking(package: str, states: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for state in states:
        base = Path(f"/dev/shm/benchmark-lightning-{os.getpid()}")
        worker = Worker(package, base)
        try:
            answer = worker.ask(what="blocking", state=state, rounds=rounds)
        finally:
            worker.close()
            shutil.rmtree(base, ignore_errors=True)
        memory, own = answer["memory"], answer["own"]
        medians = statistics.median(memory[1:]), statistics.median(own[1:])
        found[state] = {
            "memory_ms": [round(value * 1e3, 2) for value in memory],
            "own_ms": [round(value * 1e3, 2) for value in own],
            "ratio": round(medians[1] / medians[0], 2),
        }
        print(
            f"{state:6} blocking per memory save {medians[0] * 1e3:8.1f} ms, Lightning's own save to tmpfs "
            f"{medians[1] * 1e3:8.1f} ms: {medians[1] / medians[0]:.1f} times (promised {PROMISE:g}), first "
            f"{memory[0] * 1e3:.0f} and {own[0] * 1e3:.0f} ms"
        )
    return found


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval by Student's t, from the spread of the differences."""
    mean = statistics.fmean(differences)
    quantile = student_quantile(0.975, len(differences) - 1)
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def hooks(package: str, pairs: int) -> dict[str, Any]:
    base = Path(f"/dev/shm/benchmark-lightning-{os.getpid()}")
    worker = Worker(package, base)
    try:
        answer = worker.ask(what="hooks", pairs=10 * pairs, steps=100)
    finally:
        worker.close()
        shutil.rmtree(base, ignore_errors=True)
    row: dict[str, Any] = {}
    least = {name: min(values) * 1e6 for name, values in answer.items()}
    for name in ("ours", "empty"):
        differences = [(one - other) * 1e6 for one, other in zip(answer[name], answer["none"], strict=True)]
        mean, low, high = interval(differences)
        row[name] = [round(value, 2) for value in (mean, low, high)]
        # Whatever else runs on the machine only adds to a round: the least of each tells most.
        row[f"{name}_us"] = round(least[name] - least["none"], 2)
        print(
            f"hooks of a step: {name:5} {row[f'{name}_us']:+.2f} us at the least, mean {mean:+.2f} us, 95 % interval "
            f"[{low:+.2f}, {high:+.2f}] us"
        )
    row["part"] = round(row["ours_us"] / row["empty_us"], 2)
    print(f"hooks of a step: ours take {row['part']:g} times what an empty callback takes (promised {PROMISE_HOOKS:g})")
    return row


def overhead(package: str, blocks: int, allocator: Mapping[str, str]) -> dict[str, Any]:
    """Differences per step to a process without the agent: one of each block and width, and their intervals."""
    steps: dict[int, list[float]] = {width: [] for width in WIDTHS}
    pairs = {name: name.split(" - ") for name in ("agent - none", "control - none", "empty - none", "agent - empty")}
    differences: dict[int, dict[str, list[float]]] = {width: {name: [] for name in pairs} for width in WIDTHS}
    for number in range(blocks):
        for width, medians in _block(package, number, allocator).items():
            steps[width].append(medians["none"])
            for name, (one, other) in pairs.items():
                differences[width][name].append(medians[one] - medians[other])
    found: dict[str, Any] = {}
    for width in WIDTHS:
        step_us = statistics.median(steps[width])
        found[f"width {width}"] = row = {"step_us": round(step_us, 1), "blocks": blocks}
        for name, values in differences[width].items():
            mean, low, high = interval(values)
            row[name] = [round(value, 2) for value in (mean, low, high)]
            percent = ", ".join(f"{value / step_us:+.2%}" for value in (low, high))
            print(
                f"step of {step_us:8.0f} us: {name:14} {mean:+7.1f} us per step, "
                f"95 % interval [{low:+.1f}, {high:+.1f}] us = [{percent}], {blocks} blocks of new processes"
            )
    return found


def _block(package: str, number: int, allocator: Mapping[str, str]) -> dict[int, dict[str, float]]:
    """Microseconds per step by width and process, of new processes."""
    base = Path(f"/dev/shm/benchmark-lightning-{os.getpid()}")
    names = _turned(["agent", "none", "empty", "control"], number)
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            workers[name] = Worker(package, base if name == "agent" else None, allocator)
        medians: dict[int, dict[str, float]] = {}
        for width, steps in WIDTHS.items():
            jobs = {
                name: {"what": "overhead", "width": width, "steps": steps, "empty": name == "empty"} for name in names
            }
            for name in names:
                workers[name].ask(**jobs[name])
            rounds = [
                {name: workers[name].ask(**jobs[name])["median_us"] for name in _turned(names, turn)}
                for turn in range(TURNS)
            ]
            medians[width] = {name: statistics.median(one[name] for one in rounds) for name in names}
        return medians
    finally:
        for worker in workers.values():
            worker.close()
        shutil.rmtree(base, ignore_errors=True)


def _turned(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


def missed(found: dict[str, Any]) -> list[str]:
    """What is not as promised, in words; empty if all is."""
    texts = [
        f"{state}: Lightning's own save takes only {one['ratio']:g} times as long, promised {PROMISE:g}"
        for state, one in found.get("blocking", {}).items()
        if one["ratio"] < PROMISE
    ]
    part = found.get("hooks", {}).get("part", 0.0)
    if part > PROMISE_HOOKS:
        texts.append(f"hooks: {part:g} times an empty callback's time, promised {PROMISE_HOOKS:g}")
    for state, one in found.get("overhead", {}).items():
        _, low, high = one["control - none"]
        noise = (high - low) / 2
        against = "none" if one["step_us"] >= LONG_STEP_US else "empty"
        least = one[f"agent - {against}"][1]
        if not low <= 0 <= high:
            texts.append(
                f"{state}: two processes without the agent differ by {low:+g} to {high:+g} us per step, which leaves "
                "open what the agent adds; run it again with more blocks and nothing beside it"
            )
        elif least > noise:
            than = "no agent" if against == "none" else "an empty callback"
            texts.append(f"{state}: at least {least:+g} us per step more than {than}, where noise is {noise:g} us")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=30, help="of the hooks' rounds, in tens")
    parser.add_argument("--blocks", type=int, default=20, help="of new processes for the overhead, at least 2")
    parser.add_argument("--only", default="blocking,hooks,overhead")
    parser.add_argument("--states", default="llm,small")
    parser.add_argument("--package", choices=sorted(OVERLAYS), default="lightning.pytorch")
    parser.add_argument(
        "--allocator", choices=("fixed", "default"), default="fixed", help="thresholds of glibc's malloc"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = {
        "blocking": lambda: blocking(args.package, args.states.split(","), args.rounds),
        "hooks": lambda: hooks(args.package, args.pairs),
        "overhead": lambda: overhead(args.package, args.blocks, ALLOCATOR if args.allocator == "fixed" else {}),
    }
    found = {name: parts[name]() for name in args.only.split(",")}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    texts = missed(found)
    for text in texts:
        print(f"missed: {text}", file=sys.stderr)
    if not texts:
        print(f"kept, of what is promised of {', '.join(found)}")
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
