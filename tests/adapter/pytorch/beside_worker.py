"""One rank of the job beside which test_read_only_store.py reads; it saves without a pause until it is told to die."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(base, folder):
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import report
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from mlflashpoint.adapter.pytorch import MemoryStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    store = MemoryStore.from_env(base_container=f"{base}/job", job_id="job")
    alone = MemoryStore.from_env(base_container=f"{base}/alone", job_id="alone")

    def save(step):
        full = torch.full((1001, 1000), float(step))
        state = {
            "sharded": distribute_tensor(full, mesh, [Shard(0)]),
            "own": {str(rank): torch.full((300_000,), float(step))},
            "text": str(step) * 5000,
            "step": step,
        }
        dcp.save(state, checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)

    dcp.save({"mine": rank}, checkpoint_id=alone.version(1), storage_writer=alone.writer, no_dist=True)
    alone.runtime.flush()
    save(1)
    store.runtime.flush()
    dist.barrier()
    (folder / "one version").touch()

    def told(what):
        return store.runtime.agree(f"told/{what}", rank != 0 or (folder / what).exists())

    while not told("go on"):
        time.sleep(0.05)
    step = 1
    while not told("stop"):
        step += 1
        save(step)
    store.runtime.flush()
    report(
        {"last": step, "failed": store.runtime.stats()["versions_failed"], "error": store.runtime.stats()["last_error"]}
    )
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
