"""The two states that the store is measured on, as a training job would hold them."""

from __future__ import annotations

from typing import Any

import torch

HIDDEN, LAYERS, VOCABULARY = 768, 12, 32_000


def llm_state() -> dict[str, Any]:
    """A 110-million-parameter GPT: 255 tensors, 1.01 GiB, bf16 weights and fp32 Adam moments."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in (
                ("input_layernorm.weight", (HIDDEN,)),
                ("self_attention.linear_qkv.weight", (3 * HIDDEN, HIDDEN)),
                ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN)),
                ("pre_mlp_layernorm.weight", (HIDDEN,)),
                ("mlp.linear_fc1.weight", (4 * HIDDEN, HIDDEN)),
                ("mlp.linear_fc1.bias", (4 * HIDDEN,)),
                ("mlp.linear_fc2.weight", (HIDDEN, 4 * HIDDEN)),
            )
        }
    return _training_state(shapes, moments=("exp_avg", "exp_avg_sq"), step_tensor=False)


def small_state() -> dict[str, Any]:
    """5,000 tensors, 0.18 GiB: 1,000 parameters with weight, fp32 copy, Adam moments and a step tensor each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(500):
        shapes[f"blocks.{block}.weight"] = (160, 168)
        shapes[f"blocks.{block}.bias"] = (160,)
    return _training_state(shapes, moments=("master_param", "exp_avg", "exp_avg_sq"), step_tensor=True)


STATES = {"llm": llm_state, "small": small_state}


def _training_state(
    shapes: dict[str, tuple[int, ...]], *, moments: tuple[str, ...], step_tensor: bool
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1234)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    optimizer: dict[int, dict[str, Any]] = {}
    for number, shape in enumerate(shapes.values()):
        optimizer[number] = {name: random(shape, torch.float32) for name in moments}
        optimizer[number]["step"] = torch.tensor(1000.0) if step_tensor else 1000
    return {
        "model": {name: random(shape, torch.bfloat16) for name, shape in shapes.items()},
        "optimizer": {
            "state": optimizer,
            "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "params": list(optimizer)}],
        },
        "step": 1000,
        "consumed_samples": 512_000,
    }
