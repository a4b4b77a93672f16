"""When Bridge saves to memory: set where the recipe has said nothing, ahead of Bridge's own validation."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.megatron_bridge import job
from mlflashpoint.adapter.megatron_bridge.names import MANAGER
from mlflashpoint.adapter.megatron_local.fields import fields_set
from mlflashpoint.settings import StoreConfig

log = logging.getLogger("mlflashpoint.adapter.megatron_bridge")


#: fields of the checkpoint config that ``prepare`` may set
_CHANGED = ("non_persistent_ckpt_type", "non_persistent_save_interval", "non_persistent_local_ckpt_dir", "load")


@dataclass
class RecipeYaml:
    """Stands for a config's ``to_yaml``: writes what the recipe said, without what was set for memory saves.

    Bridge keeps the config in every durable checkpoint, and those are to be the same, byte for byte, as without us.

    Attributes:
        config: a ``ConfigContainer``.
        said: the recipe's values of fields of its checkpoint config.
    """

    config: Any
    said: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with fields_set(self.config.checkpoint, self.said):
            type(self.config).to_yaml(self.config, *args, **kwargs)


def prepare(config: Any) -> None:
    """Turn memory saves on in a ``ConfigContainer`` that Bridge is about to validate.

    The recipe's own interval is the cadence; where it has none, MLFLASHPOINT_SAVE_EVERY_N_STEPS is. A recipe that uses
    Bridge's global non-persistent checkpoints keeps them. What memory saves can't serve is left alone, and the log
    says why. Nothing is changed in ``observe`` mode.

    Raises:
        SettingError: a setting is malformed, or there is no job id.
    """
    this = job.begin(config)
    if this.mode == "observe" or this.active:
        return
    checkpoint = config.checkpoint
    kind = checkpoint.non_persistent_ckpt_type
    interval = checkpoint.non_persistent_save_interval or job.setting("save_every_n_steps")
    if kind == "global" or (kind is None and interval is None and this.mode != "replace"):
        return
    reason = refusal(config)
    if reason is not None:
        log.warning("this job's checkpoints do not go to memory: %s", reason)
        return
    store = StoreConfig.from_env()
    this.active = True
    config.to_yaml = RecipeYaml(config, {name: getattr(checkpoint, name) for name in _CHANGED})
    checkpoint.non_persistent_ckpt_type = "local"
    this.own_interval = bool(checkpoint.non_persistent_save_interval)
    checkpoint.non_persistent_save_interval = interval
    if checkpoint.non_persistent_local_ckpt_dir is None:
        checkpoint.non_persistent_local_ckpt_dir = str(store.base_container)
    if getattr(config, "peft", None) is not None and checkpoint.load is None:
        # Bridge asks for a resume of adapters only where there is a folder to load from; this one stays empty.
        checkpoint.load = str(Path(store.base_container) / "no-durable-adapters")
    log.info(
        "checkpoints go to memory every %s steps, kept in %s",
        interval if interval is not None else checkpoint.save_interval,
        store.base_container,
    )


def refusal(config: Any) -> str | None:
    """Why memory saves can't serve this job, None if they can."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return "nvidia_resiliency_ext is not installed, and Megatron-Core assembles no local checkpoint without it"
    if getattr(config, "peft", None) is not None:
        bridge = importlib.import_module("megatron.bridge.training.checkpointing")
        if not hasattr(bridge, "_get_non_persistent_iteration"):
            return "this Bridge can't load the weights below PEFT adapters when local checkpoints are on"
    if getattr(config.ddp, "use_megatron_fsdp", False) or getattr(config.dist, "use_torch_fsdp2", False):
        return "the job uses FSDP, which Bridge's local checkpoints do not know"
    if getattr(config.model, "restore_modelopt_state", False):
        return "model.restore_modelopt_state is set, and Bridge refuses it together with non-persistent checkpoints"
    if getattr(config.model, "megatron_mimo_parallelism_config", None) is not None:
        return "a MIMO model's checkpoints were not tested"
    return refusal_of_checkpoint(config.checkpoint)


def refusal_of_checkpoint(checkpoint: Any) -> str | None:
    """The part of ``refusal`` that a ``CheckpointConfig`` alone tells."""
    if checkpoint.ckpt_format != "torch_dist":
        return f"checkpoint.ckpt_format is {checkpoint.ckpt_format}, and Bridge's local checkpoints need torch_dist"
    if getattr(checkpoint, "also_save_hf_checkpoint", False):
        return "checkpoint.also_save_hf_checkpoint is set, and Bridge refuses it together with local checkpoints"
    custom = getattr(checkpoint, "custom_manager_class", None)
    if custom is not None and custom != MANAGER:
        return f"checkpoint.custom_manager_class is {custom}"
    return None


def due(config: Any, step: int) -> bool:
    """Whether a memory save is due at ``step`` that Bridge itself does not make because the recipe saves nowhere."""
    checkpoint = config.checkpoint
    interval = checkpoint.non_persistent_save_interval
    return not checkpoint.save and bool(interval) and step > 0 and step % interval == 0
