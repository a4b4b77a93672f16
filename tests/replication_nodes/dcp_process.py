"""One rank of the job of test_dcp_process.py: a checkpoint process per rank has the store, on three nodes.

Usage: dcp_process.py save|load DURABLE

No node has more than two of the three shards, and what all ranks have alike lies in one shard alone.
"""

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapter" / "pytorch"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import killed, scenarios
from states import blank, differing, full_state
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mlflashpoint.adapter.pytorch import MemoryStore


def main(what):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    results = {}
    scenario = scenarios(results)
    store = MemoryStore.from_env()

    def save(step):
        return dcp.async_save(
            full_state(step),
            checkpoint_id=store.version(step),
            storage_writer=store.writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    def newest():
        """Step of the newest version, and where what is loaded from it is not what was saved."""
        found, into = store.latest(), blank()
        dcp.load(into, checkpoint_id=found, storage_reader=store.reader)
        return [found.step, differing(into, full_state(found.step))]

    if what == "save":

        @scenario
        def saved():
            for step in (1, 2):
                save(step).result()
            return newest()

        @scenario
        def while_the_next_is_saved():
            pending = save(3)
            found = newest()
            pending.result()
            return found

        @scenario
        def after_that():
            return newest()

        @scenario
        def beside_dead_checkpoint_processes():
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
            dist.barrier()
            return newest()

        killed()

    @scenario
    def found():
        return newest()

    store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
