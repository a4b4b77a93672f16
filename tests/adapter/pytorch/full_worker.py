"""One rank of the job whose store is a memory file system of a few megabytes."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(base):
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import report
    from torch.distributed.checkpoint import CheckpointException

    from mlflashpoint.adapter.pytorch import MemoryStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = MemoryStore.from_env(base_container=f"{base}/job", job_id="job")

    def state(step, large):
        # Each tensor belongs to one rank, so that the large one is the trouble of that rank alone.
        return {f"rank{rank}": torch.full((1000 if not large or rank == 0 else 16 << 20,), float(step))}

    dcp.save(state(1, False), checkpoint_id=store.version(1), storage_writer=store.writer)
    began = time.monotonic()
    future = dcp.async_save(state(2, True), checkpoint_id=store.version(2), storage_writer=store.writer)
    failures = {}
    try:
        future.result()
    except CheckpointException as error:
        failures = {str(r): [type(e).__name__, str(e)] for r, (e, _) in error.failures.items()}
    seconds = time.monotonic() - began
    latest = store.latest()
    into = state(0, False)
    dcp.load(into, checkpoint_id=latest, storage_reader=store.reader)
    after = state(3, False)
    dcp.save(after, checkpoint_id=store.version(3), storage_writer=store.writer)
    report(
        {
            "failures": failures,
            "seconds": seconds,
            "latest": latest,
            "loaded": into[f"rank{rank}"][:2].tolist(),
            "next": store.latest(),
        }
    )
    dist.barrier()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
