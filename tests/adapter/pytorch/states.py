"""States as DCP jobs have them, and how to compare them."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

#: layout that saves, as kind and mesh -> those that load it; each has four ranks
MESHES = {
    "fsdp-tp-2-2": [("fsdp-tp", (2, 2)), ("fsdp-tp", (4, 1)), ("fsdp-tp", (1, 4)), ("hsdp", (2, 2))],
    "fsdp-tp-1-4": [("fsdp-tp", (2, 2)), ("fsdp-tp", (4, 1))],
    "hsdp-2-2": [("hsdp", (2, 2)), ("hsdp", (4, 1)), ("fsdp", (4,)), ("fsdp-tp", (2, 2))],
}


def fsdp_training(steps, seed=0):
    """An FSDP2 model and its optimizer after some steps; uneven shapes, equal on every world size."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Linear(7, 13), torch.nn.Linear(13, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        # The same batch on every rank, so that the reduced gradients do not depend on their number.
        model(torch.randn(4, 10, generator=data)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full_state(step, seed=0):
    """FSDP2 state, DTensors in two layouts, plain tensors of many kinds, bytes and objects."""
    model, optimizer = fsdp_training(max(1, step % 7), seed)
    weights, moments = get_state_dict(model, optimizer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = torch.Generator().manual_seed(1000 * step + seed)
    plain = torch.randn(5, 6, generator=g)
    return {
        "model": weights,
        "optimizer": moments,
        "columns": distribute_tensor(torch.randn(3, 11, generator=g), mesh, [Shard(1)]),
        "everywhere": distribute_tensor(torch.randn(4, generator=g), mesh, [Replicate()]),
        "plain": {
            "w": plain,
            "transposed": plain.t(),
            "tied": plain,
            "scalar": torch.tensor(float(step)),
            "nothing": torch.empty(0, 4),
            "flags": torch.rand(9, generator=g) > 0.5,
            "half": torch.randn(7, generator=g).bfloat16(),
            "eighth": torch.randn(6, generator=g).to(torch.float8_e4m3fn),
            "complex": torch.randn(3, generator=g, dtype=torch.complex64),
        },
        "objects": {"blob": bytes([step % 256]) * 10_000, "list": [step, "x", None], "empty": b""},
        "step": step,
    }


def blank(step=0):
    """A state of the same structure with other values."""
    return full_state(step + 3, seed=99)


def leaves(value):
    if isinstance(value, dict):
        return [
            (f"{key}.{name}" if name else str(key), leaf)
            for key, entry in value.items()
            for name, leaf in leaves(entry)
        ]
    if isinstance(value, list) and any(isinstance(entry, (dict, torch.Tensor)) for entry in value):
        return [(f"{i}.{name}", leaf) for i, entry in enumerate(value) for name, leaf in leaves(entry)]
    return [("", value)]


def bits(leaf):
    """Something that is equal for equal bits; of a DTensor, those of this rank's part."""
    if isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    if isinstance(leaf, torch.Tensor):
        return list(leaf.shape), str(leaf.dtype), leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return leaf


def differing(one, other):
    """Names of the leaves that differ on this rank."""
    mine, theirs = dict(leaves(one)), dict(leaves(other))
    return sorted(name for name in mine.keys() | theirs.keys() if bits(mine.get(name)) != bits(theirs.get(name)))
