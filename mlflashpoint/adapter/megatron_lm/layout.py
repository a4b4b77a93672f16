"""How a Megatron-LM job lays its state out over the ranks, in one line."""

from __future__ import annotations

from typing import Any

from mlflashpoint.adapter.megatron_local.parameters import release

#: (argument, short name): what decides the layout
_DECISIVE = (
    ("tensor_model_parallel_size", "tp"),
    ("pipeline_model_parallel_size", "pp"),
    ("virtual_pipeline_model_parallel_size", "vpp"),
    ("context_parallel_size", "cp"),
    ("expert_model_parallel_size", "ep"),
    ("expert_tensor_parallel_size", "etp"),
    ("gtp_weight_remat_size", "gtp"),
    ("use_tp_pp_dp_mapping", "tp_pp_dp"),
    ("optimizer", "optimizer"),
    ("use_distributed_optimizer", "distributed"),
    ("use_layer_wise_distributed_optimizer", "layer_wise"),
    ("use_precision_aware_optimizer", "precision_aware"),
    ("params_dtype", "dtype"),
    ("ddp_bucket_size", "bucket"),
    ("num_distributed_optimizer_instances", "instances"),
    ("overlap_grad_reduce", "overlap"),
    ("accumulate_allreduce_grads_in_fp32", "fp32_grads"),
    ("non_persistent_local_ckpt_algo", "algo"),
    ("ckpt_fully_parallel_save", "parallel_save"),
    ("no_save_optim", "no_optim"),
    ("no_save_rng", "no_rng"),
)


def topology_of(arguments: Any) -> str:
    """One readable line that is equal on all ranks, and equal for two starts whose shards fit each other."""
    parts = [f"core={release('megatron-core')}"]
    for argument, short in _DECISIVE:
        value = getattr(arguments, argument, None)
        if value is not None and value is not False:
            parts.append(f"{short}={str(value).removeprefix('torch.')}")
    return " ".join(parts)
