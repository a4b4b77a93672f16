"""Looks at single parts of the adapter, from inside a process that has the real Bridge; each returns plain data."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

#: what a recipe says of its checkpoints, by a name for it
RECIPES: dict[str, dict[str, Any]] = {
    "says nothing": {},
    "local with an interval": {"non_persistent_ckpt_type": "local", "non_persistent_save_interval": 7},
    "an interval and no type": {"non_persistent_save_interval": 7},
    "local without an interval": {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "/scratch"},
    "global": {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 7},
    "HF export": {"also_save_hf_checkpoint": True},
    "fsdp_dtensor": {"ckpt_format": "fsdp_dtensor"},
    "another manager": {"custom_manager_class": "somebody.else.Manager"},
}


def cadences(request: dict[str, Any]) -> dict[str, Any]:
    """Type, interval and folder of local checkpoints after ``prepare``, and the yaml that Bridge would keep of them."""
    from bridge_on_cpu.recipe import Options, configuration

    from mlflashpoint.adapter.megatron_bridge import cadence

    found = {}
    for name, checkpoint in RECIPES.items():
        known = {**checkpoint, "save": "/tmp/save"}
        config = configuration(Options(checkpoint=known))
        unset = [field for field, value in checkpoint.items() if getattr(config.checkpoint, field, None) != value]
        if unset:
            continue
        cadence.prepare(config)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.yaml")
            config.to_yaml(str(path))
            kept = [line.strip() for line in path.read_text().splitlines() if "non_persistent_" in line]
        made = config.checkpoint
        found[name] = {
            "type": made.non_persistent_ckpt_type,
            "interval": made.non_persistent_save_interval,
            "folder": made.non_persistent_local_ckpt_dir,
            "yaml": kept,
        }
    return found


def validated(request: dict[str, Any]) -> dict[str, Any]:
    """The same of a config that Bridge itself validates, with the agent on."""
    from bridge_on_cpu.recipe import Options, configuration

    config = configuration(Options(save="/tmp/save"))
    config.checkpoint.save_interval = 100
    config.validate()
    return {
        "type": config.checkpoint.non_persistent_ckpt_type,
        "interval": config.checkpoint.non_persistent_save_interval,
    }


def there_and_back(request: dict[str, Any]) -> dict[str, Any]:
    """A shard of everything that a Megatron state may hold goes through the core's own writer and reader."""
    import numpy
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
    from megatron.core.rerun_state_machine import RerunMode

    from mlflashpoint.adapter.megatron_local import tensor_aware
    from mlflashpoint.core.state import flatten, unflatten

    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    rng_state = [{"numpy": numpy.random.get_state(), "mode": RerunMode.DISABLED}]
    sharded = {
        "model": {
            "a.weight": ShardedTensor.from_rank_offsets("a.weight", weight, (0, 1, 2), replica_id=(0, 1, 2)),
            "b.weight": ShardedTensor.from_rank_offsets("b.weight", torch.zeros(2, dtype=torch.bfloat16)),
            "a._extra_state": ShardedObject("a._extra_state", io.BytesIO(b"fp8"), (1,), (0,)),
        },
        "optimizer": {"state": {0: {(torch.float32, torch.bfloat16): [ShardedObject("o", {"lr": 0.1}, (2,), (1,))]}}},
        "rng_state": ShardedObject("rng", rng_state, (1,), (0,)),
    }
    sharded["model"]["b.weight"].data = None
    common = {"iteration": 3, "train_state_metadata": {"step": torch.tensor(3)}}
    tensor_aware.register()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "layer_wise_optimizer_1.pt").write_bytes(b"x" * 10_000)
        shard = tensor_aware.LocalShard(MCoreTensorAwareStateDict(common, sharded), folder)
        flat = flatten(shard)
        before = [tensor.detach().clone() for tensor in flat.tensors]
        (folder / "layer_wise_optimizer_1.pt").write_bytes(b"of a later step")
        back = tensor_aware.put_together(unflatten(flat.skeleton, before), folder)
        side = (folder / "layer_wise_optimizer_1.pt").read_bytes()
    model = back.sharded_state_dict["model"]
    made, rng = model["a.weight"], back.sharded_state_dict["rng_state"]
    return {
        "tensor": torch.equal(made.data, weight) and _but_data(made) == _but_data(sharded["model"]["a.weight"]),
        "grad": made.data.requires_grad,
        "fields": vars(made).keys() == vars(sharded["model"]["a.weight"]).keys(),
        "hollow": model["b.weight"].data is None and model["b.weight"].dtype == torch.bfloat16,
        "extra": model["a._extra_state"].data.getvalue().decode(),
        "optimizer": back.sharded_state_dict["optimizer"]["state"][0][torch.float32, torch.bfloat16][0].data,
        "numpy": bool((rng.data[0]["numpy"][1] == sharded["rng_state"].data[0]["numpy"][1]).all()),
        "enum": rng.data[0]["mode"] is RerunMode.DISABLED,
        "common": [back.common["iteration"], int(back.common["train_state_metadata"]["step"])],
        "file": side == b"x" * 10_000,
    }


def _but_data(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name != "data"}


def unlike_parameters(request: dict[str, Any]) -> dict[str, Any]:
    """What ``parameters.unlike`` says of a model whose parameters hold what was given, but for one."""
    import torch

    from mlflashpoint.adapter.megatron_local import parameters

    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[0] = float("nan")
    given = {"model": {name: value.detach().clone() for name, value in model.named_parameters()}}
    same = parameters.unlike(given, [model])
    given["model"]["weight"][0, 0] += 1
    changed = parameters.unlike(given, [model])
    del given["model"]["bias"]
    return {"same": same, "changed": changed, "missing": parameters.unlike(given, [model])}


def without_nvrx(request: dict[str, Any]) -> dict[str, Any]:
    """Why a job is refused where NVRx is not installed."""
    import sys

    from bridge_on_cpu.recipe import Options, configuration

    from mlflashpoint.adapter.megatron_bridge import cadence

    config = configuration(Options(save="/tmp/save"))
    with_it = cadence.refusal(config)
    sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]
    return {"with": with_it, "without": cadence.refusal(config)}
