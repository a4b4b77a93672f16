"""One call that turns a recipe's checkpoint config over to the memory store."""

from __future__ import annotations

from typing import Any

from mlflashpoint.adapter.megatron_bridge.cadence import refusal_of_checkpoint
from mlflashpoint.adapter.megatron_bridge.names import MANAGER, PACKAGE
from mlflashpoint.errors import SettingError
from mlflashpoint.settings import StoreConfig


def enable(checkpoint_config: Any, non_persistent_save_interval: int) -> Any:
    """Keep Bridge's local checkpoints in memory, saved every ``non_persistent_save_interval`` steps.

    Sets ``custom_manager_class``, ``non_persistent_ckpt_type`` and the interval, and lets Bridge import this package
    by name, which it refuses for packages that it does not know.

    Args:
        checkpoint_config: Bridge's ``CheckpointConfig``, changed in place.
        non_persistent_save_interval: steps between two memory saves, from 1.

    Returns:
        ``checkpoint_config``.

    Raises:
        SettingError: the interval is no number of steps, the config can't be served, or the environment names no job.
    """
    if isinstance(non_persistent_save_interval, bool) or not isinstance(non_persistent_save_interval, int):
        raise SettingError("the interval is no whole number", value=non_persistent_save_interval)
    if non_persistent_save_interval < 1:
        raise SettingError(f"an interval of {non_persistent_save_interval} steps", remedy="give 1 or more")
    reason = refusal_of_checkpoint(checkpoint_config)
    if reason is not None:
        raise SettingError(reason, remedy="change the recipe, or leave memory checkpoints off")
    store = StoreConfig.from_env()
    allow_target()
    checkpoint_config.custom_manager_class = MANAGER
    checkpoint_config.non_persistent_ckpt_type = "local"
    checkpoint_config.non_persistent_save_interval = non_persistent_save_interval
    if checkpoint_config.non_persistent_local_ckpt_dir is None:
        checkpoint_config.non_persistent_local_ckpt_dir = str(store.base_container)
    return checkpoint_config


def allow_target() -> None:
    """Let Bridge import classes of this package that a config names; Bridge before 0.5 asks for no permission."""
    try:
        from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
    except ImportError:
        return
    register_allowed_target_prefix(PACKAGE)
