"""Speed of DCP on the memory store, each figure against yardsticks measured in the same run.

    python benchmarks/dcp.py [--rounds 7] [--states llm,small] [--json FILE]

One process. ``x`` is the time over that of one one-thread memcpy of the same bytes, contiguous, into warm tmpfs memory.
All methods take turns round by round, and the medians are given. Blocking is the time until ``dcp.save`` returns; the
background is waited for before the next method runs. ``find`` is what a restart does first: it compares the digest of
every tensor, which DCP has no counterpart of; ``load`` is ``dcp.load`` of what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import mmap
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.states import STATES
from mlflashpoint.adapter.pytorch import MemoryStore

#: (state, method, divisor, bound, whether the ratio has to be at most that)
PROMISES = (
    ("llm", "save", "memcpy", 3.0, True),
    ("small", "save", "memcpy", 12.0, True),
    ("llm", "dcp save to tmpfs", "save", 2.5, False),
    ("small", "dcp save to tmpfs", "save", 8.0, False),
    ("llm", "dcp load from tmpfs", "load", 4.0, False),
    ("small", "dcp load from tmpfs", "load", 4.0, False),
)
US_PER_TENSOR = 25.0


class Memcpy:
    def __init__(self, nbytes: int) -> None:
        path = f"/dev/shm/mlflashpoint-benchmark-{os.getpid()}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        os.posix_fallocate(handle, 0, nbytes)
        self.target = torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
        os.close(handle)
        self.source = torch.ones(nbytes, dtype=torch.uint8)
        self.target.fill_(1)

    def __call__(self) -> None:
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.source.numel())


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for entry in value.values() for found in tensors(entry)]
    if isinstance(value, list):
        return [found for entry in value for found in tensors(entry)]
    return []


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    state = STATES[name]()
    into = STATES[name]()
    found = tensors(state)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in found)
    store = MemoryStore.from_env(job_id=f"benchmark-{name}", base_container=folder / name, replicas=0)
    durable = folder / f"{name}-durable"
    steps = iter(range(1, 1_000_000))

    def ours(planner: Any) -> Callable[[], None]:
        return lambda: dcp.save(
            state, checkpoint_id=store.version(next(steps)), storage_writer=store.writer, planner=planner
        )  # type: ignore[func-returns-value]

    def async_save() -> None:
        pending.append(
            dcp.async_save(
                state, checkpoint_id=store.version(next(steps)), storage_writer=store.writer, planner=store.planner
            )
        )

    def settle() -> None:
        while pending:
            pending.pop().result()
        store.runtime.flush(60)

    def find() -> None:
        newest.append(store.latest())

    def load() -> None:
        dcp.load(into, checkpoint_id=newest.pop(), storage_reader=store.reader)

    pending: list[Any] = []
    newest: list[Any] = []
    memcpy = Memcpy(nbytes)
    methods: dict[str, Callable[[], Any]] = {
        "memcpy": memcpy,
        "save": ours(store.planner),
        "save, DCP's own planner": ours(None),
        "async_save": async_save,
        "dcp save to tmpfs": lambda: dcp.save(state, checkpoint_id=durable),
        "find": find,
        "load": load,
        "dcp load from tmpfs": lambda: dcp.load(into, checkpoint_id=durable),
    }
    times: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(rounds + 2):
        for method, run in methods.items():
            if method == "dcp save to tmpfs":
                shutil.rmtree(durable, ignore_errors=True)
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
            settle()
            if number >= 2:
                times[method].append(took)
    same = all(torch.equal(a, b) for a, b in zip(found, tensors(into), strict=True))
    store.close()
    times["find and load"] = [sum(pair) for pair in zip(times["find"], times["load"], strict=True)]
    medians = {method: statistics.median(values) for method, values in times.items()}
    added = (medians["save"] - medians["memcpy"]) / len(found) * 1e6
    return {
        "tensors": len(found), "bytes": nbytes, "loaded_equal": same, "seconds": medians, "us_per_tensor": added,
        "x": {method: value / medians["memcpy"] for method, value in medians.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--states", default="llm,small")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    folder = Path(f"/dev/shm/mlflashpoint-benchmark-dcp-{os.getpid()}")
    folder.mkdir(mode=0o700)
    try:
        results = {name: measure(name, arguments.rounds, folder) for name in arguments.states.split(",")}
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    kept = True
    for name, result in results.items():
        print(
            f"{name}: {result['tensors']} tensors, {result['bytes'] / 2**30:.2f} GiB, equal: {result['loaded_equal']}"
        )
        for method, seconds in result["seconds"].items():
            print(f"  {method:26} {seconds * 1e3:9.1f} ms {result['x'][method]:7.2f} x")
        print(f"  per added tensor           {result['us_per_tensor']:9.1f} us")
        kept &= result["loaded_equal"] and (name != "small" or result["us_per_tensor"] <= US_PER_TENSOR)
    for name, method, divisor, bound, at_most in PROMISES:
        if name in results:
            ratio = results[name]["seconds"][method] / results[name]["seconds"][divisor]
            good = ratio <= bound if at_most else ratio >= bound
            kept &= good
            sign = "at most" if at_most else "at least"
            print(f"{'ok  ' if good else 'MISS'} {name}: {method} / {divisor} = {ratio:.2f}, {sign} {bound}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
