"""What a save to memory costs the training loop, and a load, as multiples of one memory copy.

    python -m benchmarks.save [--json] [--rounds 15] [--states llm,small]

``x`` is the median time over that of the *limit*, measured in the same rounds: one one-thread ``memcpy`` of the same
bytes, contiguous, into a warm tmpfs mapping. First the ways to save take turns with it, then the load. One rank.

``save_x``        ``Runtime.save`` until it returns, a warm save; the background is waited for outside of the timing
``first_save_x``  the first save of a new job: slots are allocated and mapped; median of three jobs
``load_x``        into an existing state, from a shard that is open: what is left to do once recovery has checked it
``first_load_x``  ``Runtime.load`` after ``find_latest``, once per job: opens what is not open, pairs, copies
``dcp_save_x``    ``torch.distributed.checkpoint.save`` to a folder on tmpfs
``torch_save_x``  ``torch.save`` to a file on tmpfs

The exit code is 1 if a target is missed: 1.3 (LLM) and 1.6 (small) for ``save_x``, 1.4 for ``load_x``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import logging
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TARGETS = {"llm": {"save_x": 1.3, "load_x": 1.4}, "small": {"save_x": 1.6, "load_x": 1.4}}
#: what the larger state needs at once: itself, two slots, the limit's source and target, a file of the others
NEEDED_BYTES = 9 << 30
_NEW_JOBS = 3


def measure(name: str, folder: Path, rounds: int) -> dict[str, float]:
    """Ratios for one state; ``folder`` is on tmpfs."""
    import torch
    import torch.distributed.checkpoint as dcp

    from benchmarks.states import STATES
    from mlflashpoint.core.runtime import Runtime
    from mlflashpoint.settings import StoreConfig

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    state = STATES[name]()
    times: dict[str, list[float]] = {}

    def timed(method: str, action: Callable[[], object]) -> Any:
        begin = time.perf_counter()
        result = action()
        times.setdefault(method, []).append(time.perf_counter() - begin)
        return result

    @contextlib.contextmanager
    def job(number: int) -> Iterator[Runtime]:
        config = StoreConfig(job_id="benchmark", base_container=folder / f"job-{number}", replicas=0)
        runtime = Runtime(config, rank=0, world_size=1, local_rank=0)
        try:
            yield runtime
        finally:
            runtime.close()
            shutil.rmtree(folder / f"job-{number}")

    def save(runtime: Runtime, step: int, method: str) -> None:
        state["step"] = step
        result = timed(method, lambda: runtime.save(state, step=step, wait=False))
        if not result.ok or not runtime.flush(120):
            raise SystemExit(f"the save failed: {result.error}")

    for number in range(_NEW_JOBS):
        with job(number) as runtime:
            save(runtime, 1, "first_save_x")
            timed("first_load_x", functools.partial(runtime.load, runtime.find_latest(), into=state))

    with job(_NEW_JOBS) as runtime:
        save(runtime, 1, "warm up")
        save(runtime, 2, "warm up")
        nbytes = runtime.load(runtime.find_latest()).record.data_bytes
        limit = _limit(folder / "limit", nbytes)
        for step in range(3, 3 + rounds):
            timed("limit", limit)
            save(runtime, step, "save_x")
            timed("torch_save_x", lambda: torch.save(state, folder / "torch"))
            os.unlink(folder / "torch")
            timed("dcp_save_x", lambda: dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True))
            shutil.rmtree(folder / "dcp")
        with runtime.load_shard(runtime.find_latest(), 0) as reader:
            reader.state(into=state)
            for _ in range(rounds):
                timed("limit of loads", limit)
                timed("load_x", functools.partial(reader.state, into=state))

    def ratio(method: str) -> float:
        unit = times["limit of loads" if method == "load_x" else "limit"]
        return round(statistics.median(times[method]) / statistics.median(unit), 3)

    limit_gb_s = round(nbytes / statistics.median(times["limit"]) / 1e9, 2)
    return {"limit_gb_s": limit_gb_s, **{method: ratio(method) for method in times if method.endswith("_x")}}


def _limit(path: Path, nbytes: int) -> Callable[[], object]:
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.posix_fallocate(descriptor, 0, nbytes)
    target = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    os.close(descriptor)
    target.fill_(0)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


def missed(results: dict[str, dict[str, float]]) -> list[str]:
    """Targets that were not reached."""
    return [
        f"{name} {method} {results[name][method]} > {most}"
        for name, targets in TARGETS.items()
        for method, most in targets.items()
        if name in results and results[name][method] > most
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--states", default="llm,small")
    parser.add_argument("--measure", nargs=2, metavar=("STATE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], Path(options.measure[1]), options.rounds)))
        return 0
    available = next(
        int(line.split()[1]) << 10 for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line
    )
    if available < NEEDED_BYTES:
        raise SystemExit(f"{available >> 30} GiB of memory are available, {NEEDED_BYTES >> 30} are needed")
    results = {}
    for name in options.states.split(","):
        # A process of its own, so that nothing of it outlives it: whatever ends it, the folder goes.
        folder = tempfile.mkdtemp(dir="/dev/shm", prefix="mlflashpoint-benchmark-")
        command = [sys.executable, "-m", "benchmarks.save", "--rounds", str(options.rounds)]
        try:
            done = subprocess.run(
                [*command, "--measure", name, folder],
                stdout=subprocess.PIPE,
                check=True,
                timeout=1800,
                # As torchrun starts a rank.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        results[name] = json.loads(done.stdout)
    if options.json:
        print(json.dumps(results))
    else:
        for name, ratios in results.items():
            print(f"{name}: " + ", ".join(f"{method} {ratio}" for method, ratio in ratios.items()))
    for target in missed(results):
        print(f"missed: {target}", file=sys.stderr)
    return 1 if missed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
