"""A small training job with a collective in each step, started by torchrun; rank 1 kills itself in the first attempt.

Usage: elastic_job.py STEPS KILL_AT OUT
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mlflashpoint.core.runtime import Runtime

steps, kill_at, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# torchrun's store outlives a restart, and gloo trips over dead ranks' addresses in it; the runtime must not.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, False)
dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=world)

weights = torch.zeros(1000, dtype=torch.float64)
momentum = torch.zeros_like(weights)
generator = torch.Generator().manual_seed(rank)

runtime = Runtime.from_env(store=store)
recovery = runtime.find_latest()
first = 0
if recovery is not None:
    loaded = runtime.load(recovery, into={"w": weights, "m": momentum, "rng": generator.get_state()})
    generator.set_state(loaded.state["rng"])
    first = loaded.step
runtime.resumed(first)

for step in range(first + 1, steps + 1):
    gradient = torch.randn(1000, dtype=torch.float64, generator=generator)
    dist.all_reduce(gradient)
    momentum.mul_(0.9).add_(gradient)
    weights.sub_(momentum, alpha=0.1)
    result = runtime.save({"w": weights, "m": momentum, "rng": generator.get_state()}, step=step)
    assert result.ok, result.error
    if rank == 1 and attempt == 0 and step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

runtime.flush()
dist.barrier()
seen = {"first": first, "attempt": attempt, "sum": weights.sum().item().hex(), "stats": runtime.stats()}
out.with_name(f"{out.name}.{rank}").write_text(json.dumps(seen))
dist.destroy_process_group()
