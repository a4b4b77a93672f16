"""A real GPTModel with DDP and a distributed optimizer, small enough for a CPU, and its sharded state."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig


def build(seed, tp):
    """A fresh model and optimizer with ``tp``-fold tensor parallelism over all ranks."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16, params_dtype=torch.bfloat16, bf16=True, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, tensor_model_parallel_size=tp,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32
    ).bfloat16()
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        ),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [model],
    )
    return model, optimizer


def train(model, optimizer, steps, seed=5):
    """Some steps on the same data on every rank; the losses."""
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 128, (2, 16), generator=data)
        places = torch.arange(16)[None].expand(2, -1)
        mask = torch.tril(torch.ones(1, 1, 16, 16)) < 0.5
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(ids, places, mask, labels=ids).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def metadata(kind):
    """What Megatron's loops hand to ``sharded_state_dict``; ``kind`` is the optimizer's sharding."""
    return {
        "distrib_optim_sharding_type": kind,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded(model, optimizer, step, *, loading=False, kind="dp_reshardable"):
    """The state dict for ``dist_checkpointing``: sharded parts and a common one."""
    described = metadata(kind)
    state = {"model": model.module.sharded_state_dict(metadata=described)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=described)
    if not loading:
        state |= {"iteration": step, "args": {"lr": 0.1, "nothing": None}, "list": [1, None, "x"]}
    return state


def restore(model, optimizer, loaded):
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def bits(model, optimizer):
    """Everything that training depends on, on this rank, as bytes by name."""
    found = {name: _bytes(parameter) for name, parameter in model.module.named_parameters()}
    for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for group, params in enumerate(part.optimizer.param_groups):
            found[f"{number}.{group}.step"] = params.get("step")
            for place, parameter in enumerate(params["params"]):
                found[f"{number}.{group}.{place}"] = _bytes(parameter)
                for name, value in part.optimizer.state[parameter].items():
                    found[f"{number}.{group}.{place}.{name}"] = _bytes(value)
    return found


def _bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(one, other):
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
