"""A training job on several nodes, started by torchrun: a collective in each step, a save after each.

Usage: job.py STEPS OUT PAUSE_S NUMBERS

Each rank appends to OUT/progress.RANK one JSON line per step, and one at the end. Weights follow from the ranks' random
numbers alone, so an unbroken run can be computed by anyone. Replication goes over eth1, the job itself over eth0.
"""

import datetime
import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

steps, out, pause_s, numbers = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
logging.basicConfig(format="%(relativeCreated)d %(levelname)s %(message)s", stream=sys.stdout, level=logging.WARNING)
logging.getLogger("mlflashpoint").setLevel(logging.DEBUG)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
# From here on only the store's own links are made.
os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("REPLICATION_IFNAME", "eth1")

from mlflashpoint.core.runtime import Runtime  # noqa: E402

progress = open(out / f"progress.{rank}", "a", buffering=1)  # noqa: SIM115


def tell(**fields):
    progress.write(json.dumps({"rank": rank, "at": time.time(), **fields}) + "\n")


weights = torch.zeros(numbers, dtype=torch.float64)
momentum = torch.zeros_like(weights)
generator = torch.Generator().manual_seed(rank)

runtime = Runtime.from_env()
recovery = runtime.find_latest()
first = 0
if recovery is not None:
    loaded = runtime.load(recovery, into={"w": weights, "m": momentum, "rng": generator.get_state()})
    generator.set_state(loaded.state["rng"])
    first = loaded.step
runtime.resumed(first)
tell(first=first)

for step in range(first + 1, steps + 1):
    # Whole numbers: their sum is the same in whatever order the ranks are added.
    gradient = torch.randint(-9, 10, (1000,), generator=generator).double()
    dist.all_reduce(gradient)
    momentum[:1000].mul_(0.9).add_(gradient)
    weights[:1000].sub_(momentum[:1000], alpha=0.1)
    result = runtime.save({"w": weights, "m": momentum, "rng": generator.get_state()}, step=step)
    stats = runtime.stats()
    tell(
        step=step,
        ok=result.ok,
        skipped=result.skipped,
        blocking_s=result.blocking_s,
        error=str(result.error or ""),
        complete=stats["last_complete_step"],
        lag=stats["replica_bytes_outstanding"],
        last_error=stats["replica_last_error"],
    )
    time.sleep(pause_s)

flushed = runtime.flush()
dist.barrier()
give_up = time.monotonic() + 10
while runtime.stats()["last_complete_step"] < steps and time.monotonic() < give_up:
    time.sleep(0.05)
tell(end=True, sum=weights.sum().item().hex(), flushed=flushed, stats=runtime.stats())
dist.barrier()
runtime.close()
dist.destroy_process_group()
