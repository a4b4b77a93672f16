"""What a test does to a run from inside, beside its recipe; each takes the run's config."""

from __future__ import annotations

from typing import Any


def forget_a_bias_on_load(config: Any) -> None:
    """Bridge's load misses one parameter, which it would say in its log only."""
    import megatron.bridge.training.checkpointing as checkpointing

    original = checkpointing._load_model_state_dict

    def forgetful(module: Any, state_dict: Any, strict: bool) -> Any:
        del state_dict["decoder.final_layernorm.bias"]
        return original(module, state_dict, strict)

    checkpointing._load_model_state_dict = forgetful


def enable_as_a_library(config: Any) -> None:
    """The two lines that a recipe adds to use the library form."""
    import mlflashpoint.adapter.megatron_bridge as mlf_bridge

    mlf_bridge.enable(config.checkpoint, non_persistent_save_interval=2)
