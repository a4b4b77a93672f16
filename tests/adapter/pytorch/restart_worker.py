"""One rank of one start of the job that test_restart.py starts again, on another number of ranks each time."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(what, base, durable):
    import warnings

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import report
    from states import blank, differing, full_state
    from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

    from mlflashpoint.adapter.pytorch import MemoryStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = MemoryStore.from_env(base_container=f"{base}/job", job_id="job")
    alone = MemoryStore.from_env(base_container=f"{base}/alone", job_id="alone")
    results = {}

    def save(step):
        state = full_state(step)
        dcp.save(state, checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)
        dcp.save(state, checkpoint_id=f"{durable}/step-{step}")
        store.runtime.flush()

    latest = store.latest()
    results["latest"] = latest
    if latest is not None:
        from_memory, from_disk = blank(), blank()
        dcp.load(from_memory, checkpoint_id=latest, storage_reader=store.reader)
        dcp.load(from_disk, checkpoint_id=f"{durable}/step-{latest.step}")
        results["differing"] = differing(from_memory, from_disk)
        results["untouched"] = differing(from_memory, blank()) == []
    if what == "begin":
        save(10)
        dcp.save({"n": rank}, checkpoint_id=alone.version(10), storage_writer=alone.writer, no_dist=True)
        alone.runtime.flush()

        class Stuck(DefaultSavePlanner):
            def resolve_data(self, write_item):
                if rank == 1:
                    time.sleep(3600)
                return super().resolve_data(write_item)

        dcp.async_save(full_state(20), checkpoint_id=store.version(20), storage_writer=store.writer, planner=Stuck())
        dist.barrier(dist.new_group())
        report(results)
        # Rank 0 has staged its part by now or not; rank 1 never will.
        threading.Event().wait(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "go on":
        save(30)
        report(results)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    newest = alone.latest()
    try:
        dcp.load({"n": -1}, checkpoint_id=newest, storage_reader=alone.reader, no_dist=True)
        results["alone"] = None
    except CheckpointException as error:
        (failure,) = [failure for failure, _ in error.failures.values()]
        results["alone"] = [type(failure).__name__, str(failure)]
    report(results)
    dist.barrier()
    store.close()
    alone.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
