"""One rank of the job that test_meshes.py starts: states on device meshes of two dimensions.

Usage: meshes_worker.py BASE DURABLE save|load
"""

import os
import signal
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import scenarios
from states import MESHES, differing
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mlflashpoint.adapter.pytorch import MemoryStore


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 20), torch.nn.Linear(20, 12, bias=False)
        self.norm = torch.nn.LayerNorm(12)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def built(kind, shape, seed):
    """A model and its optimizer in that layout."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Block(), Block())
    names = {"fsdp-tp": ("dp", "tp"), "hsdp": ("replicate", "shard"), "fsdp": ("dp",)}[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model:
        if kind == "fsdp-tp":
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"] if kind == "fsdp-tp" else mesh)
    fully_shard(model, mesh=mesh["dp"] if kind == "fsdp-tp" else mesh)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def state(kind, shape, seed, steps):
    model, optimizer = built(kind, shape, seed)
    data = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 12, generator=data)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": steps}


def main(base, durable, what):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    results = {}
    scenario = scenarios(results)

    for layout, targets in MESHES.items():
        kind, *shape = layout.rsplit("-", 2)
        store = MemoryStore.from_env(base_container=f"{base}/{layout}", job_id=layout)

        def save(store=store, layout=layout, kind=kind, shape=shape):
            content = state(kind, tuple(map(int, shape)), 1, 3)
            dcp.save(content, checkpoint_id=Path(durable) / layout)
            for step in (1, 2):
                dcp.save(content, checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)
            return store.latest().step

        def load(store=store, layout=layout, targets=targets):
            latest, found = store.latest(), {}
            for kind, shape in targets:
                into, expected = state(kind, shape, 2, 1), state(kind, shape, 3, 1)
                fresh = state(kind, shape, 2, 1)
                dcp.load(into, checkpoint_id=latest, storage_reader=store.reader)
                dcp.load(expected, checkpoint_id=Path(durable) / layout)
                name = "-".join(map(str, (kind, *shape)))
                found[name] = [latest.step, differing(into, expected), len(differing(into, fresh)) > 20]
            return found

        run = save if what == "save" else load
        run.__name__ = layout
        scenario(run)
    dist.barrier()
    if what == "save":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
