"""A user's script on the library: it goes on from what its memory store finds, and is ended as a scheduler does it.

Two steps a start. ``--by process`` leaves the saves to a checkpoint process, which SIGTERM does not reach then.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mlflashpoint.adapter.pytorch import MemoryStore


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--by", choices=("sync", "process"), default="sync")
    parser.add_argument("--terminated", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = MemoryStore.from_env()
    weights = torch.zeros(100, dtype=torch.float64)
    state = {f"weights-{rank}": weights, "step": 0}
    newest = store.latest()
    if newest is not None:
        dcp.load(state, checkpoint_id=newest, storage_reader=store.reader)
    report = {"found": state["step"], "sum": weights.sum().item()}
    (arguments.out / f"report-{rank}.json").write_text(json.dumps(report))
    for _ in range(2):
        state["step"] += 1
        weights += torch.arange(100) + rank
        where = {"checkpoint_id": store.version(state["step"]), "storage_writer": store.writer}
        if arguments.by == "sync":
            dcp.save(state, planner=store.planner, **where)
        else:
            dcp.async_save(state, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **where).result()
    if arguments.terminated:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGTERM)
    store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
