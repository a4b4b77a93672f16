"""What replication adds to the time that a save holds training up, against the same saves without it in one run.

    python -m benchmarks.replicated_save [--json] [--mib 256] [--rounds 15]

Two ranks, each a process with a base container of its own, so that they are two nodes to the store; replicas go over
loopback. Two stores take turns round by round, one with a replica on the other node and one without.

``quiet_x``  nothing is on its way when the save begins; the target is 1.1
``busy_x``   the replica of the save before is on its way (three slots). Both processes share this machine's processors
             with that transfer, which is what a node does, but not with both ends of it: no target
``step_x``   mean time of a training step on one core with a replicated save every five steps, blocking included, over
             that without saves, in blocks of ten steps in turn: no target, for it depends on how long a step is
``step_alone_x``  the same of saves without replicas, in the same turns: what ``step_x`` has beyond it is replication
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig

TARGET = 1.1
_DEADLINE_S = 300.0


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, port: int, folder: Path, mib: int) -> None:
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=_DEADLINE_S))
        self.state = {f"w{number}": torch.rand(mib << 14) for number in range(16)}
        self.meetings = self.step = 0
        self.runtimes = {}
        for name, replicas in (("off", 0), ("on", 1)):
            config = StoreConfig(
                job_id="benchmark", base_container=folder / f"{name}-{rank}", replicas=replicas, keep_versions=3
            )
            runtime = Runtime(config, rank=rank, world_size=2, local_rank=0, store=self.store, group=name)
            runtime.find_latest()
            self.runtimes[name] = runtime

    def meet(self) -> None:
        self.meetings += 1
        key = f"meet/{self.meetings}"
        self.store.add(key, 1)
        give_up = time.monotonic() + _DEADLINE_S
        while self.store.add(key, 0) < 2:
            if time.monotonic() > give_up:
                raise SystemExit("the other rank did not come")
            time.sleep(0.001)

    def save(self, name: str) -> float:
        """Seconds that one save blocks."""
        self.step += 1
        result = self.runtimes[name].save(self.state, step=self.step, wait=False)
        if not result.ok:
            raise SystemExit(f"the save failed: {result.error}")
        return result.blocking_s

    def quiet(self, name: str) -> None:
        """Wait until all is done on both ranks, verdicts included."""
        runtime = self.runtimes[name]
        give_up = time.monotonic() + _DEADLINE_S
        while not runtime.flush() or runtime.stats()["last_complete_step"] != self.step:
            if time.monotonic() > give_up:
                raise SystemExit(f"step {self.step} did not become complete: {runtime.stats()}")
            time.sleep(0.005)
        self.meet()

    def measure(self, rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {f"{kind} {name}": [] for kind in ("quiet", "busy") for name in self.runtimes}
        for number in range(rounds + 2):
            for name in self.runtimes:
                self.meet()
                taken = self.save(name), self.save(name)
                self.quiet(name)
                # The first two rounds allocate the slots.
                if number >= 2:
                    for kind, seconds in zip(("quiet", "busy"), taken, strict=True):
                        times[f"{kind} {name}"].append(seconds)
        sent = self.runtimes["on"].stats()["replicas_acknowledged"]
        if sent != 2 * (rounds + 2):
            raise SystemExit(f"{sent} of {2 * (rounds + 2)} shards were replicated")
        return times

    def train(self, blocks: int) -> dict[str, list[float]]:
        """Seconds of each training step: without saves, with one every five steps, and with a replicated one."""
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
        model, batch = torch.nn.Sequential(*layers), torch.rand(512, 1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        arms = {"step plain": None, "step alone": "off", "step replicated": "on"}
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for block in range(blocks + 1):
            for arm, name in arms.items():
                self.meet()
                for number in range(10):
                    began = time.perf_counter()
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    if name and number % 5 == 0:
                        self.save(name)
                    # The first block warms up.
                    if block:
                        times[arm].append(time.perf_counter() - began)
                if name:
                    self.quiet(name)
        return times

    def close(self) -> None:
        self.meet()
        for runtime in self.runtimes.values():
            runtime.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicated_save", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--mib", type=int, default=256, help="size of a shard")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=6, help="blocks of ten training steps of each kind")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "PORT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        me = Rank(int(options.rank[0]), int(options.rank[1]), Path(options.rank[2]), options.mib)
        print(json.dumps({**me.measure(options.rounds), **me.train(options.blocks)}))
        me.close()
        return 0
    results = [json.loads(text) for text in _run(options)]
    steps = ("step plain", "step alone", "step replicated")
    means = {key: max(statistics.mean(result[key]) for result in results) for key in steps}
    medians = {key: max(statistics.median(result[key]) for result in results) for key in results[0]}
    ratios = {
        "quiet_x": round(medians["quiet on"] / medians["quiet off"], 3),
        "busy_x": round(medians["busy on"] / medians["busy off"], 3),
        "step_x": round(means["step replicated"] / means["step plain"], 3),
        "step_alone_x": round(means["step alone"] / means["step plain"], 3),
        "step_ms": round(means["step plain"] * 1e3, 1),
        "save_ms": round(medians["quiet off"] * 1e3, 2),
    }
    print(json.dumps(ratios) if options.json else ", ".join(f"{name} {value}" for name, value in ratios.items()))
    if ratios["quiet_x"] > TARGET:
        print(f"missed: quiet_x {ratios['quiet_x']} > {TARGET}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> list[str]:
    """What the two ranks print."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=_DEADLINE_S), wait_for_workers=False)
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="mlflashpoint-benchmark-")
    command = [sys.executable, "-m", "benchmarks.replicated_save"]
    command += [f"--{name}={getattr(options, name)}" for name in ("mib", "rounds", "blocks")]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), str(store.port), folder], stdout=subprocess.PIPE, text=True, env=environ
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=1800)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed")
        return outputs
    finally:
        for rank in ranks:
            rank.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
