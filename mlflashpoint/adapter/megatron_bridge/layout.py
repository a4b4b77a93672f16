"""How a Bridge job lays its state out over the ranks, in one line."""

from __future__ import annotations

from typing import Any

from mlflashpoint.adapter.megatron_local.parameters import release

#: (part of the config, field, short name): what decides how Megatron lays a state out over the ranks
_DECISIVE = (
    ("model", "tensor_model_parallel_size", "tp"),
    ("model", "pipeline_model_parallel_size", "pp"),
    ("model", "virtual_pipeline_model_parallel_size", "vpp"),
    ("model", "context_parallel_size", "cp"),
    ("model", "expert_model_parallel_size", "ep"),
    ("model", "expert_tensor_parallel_size", "etp"),
    ("dist", "use_tp_pp_dp_mapping", "tp_pp_dp"),
    ("optimizer", "optimizer", "optimizer"),
    ("optimizer", "use_distributed_optimizer", "distributed"),
    ("optimizer", "use_precision_aware_optimizer", "precision_aware"),
    ("optimizer", "params_dtype", "dtype"),
    ("ddp", "bucket_size", "bucket"),
    ("ddp", "num_distributed_optimizer_instances", "instances"),
    ("ddp", "overlap_grad_reduce", "overlap"),
    ("ddp", "grad_reduce_in_fp32", "fp32_grads"),
    ("checkpoint", "non_persistent_local_ckpt_algo", "algo"),
    ("checkpoint", "fully_parallel_save", "parallel_save"),
    ("checkpoint", "dist_ckpt_optim_fully_reshardable", "reshardable"),
    ("checkpoint", "save_optim", "optim"),
    ("checkpoint", "save_rng", "rng"),
)


def topology_of(config: Any) -> str:
    """One readable line that is equal on all ranks, and equal for two starts whose shards fit each other."""
    parts = [f"core={release('megatron-core')}"]
    for part, field, short in _DECISIVE:
        value = getattr(getattr(config, part, None), field, None)
        if value is not None and value is not False:
            parts.append(f"{short}={str(value).removeprefix('torch.')}")
    if getattr(config, "peft", None) is not None:
        parts.append(f"peft={type(config.peft).__name__}")
    return " ".join(parts)
