"""What the agent knows of the one training job in this process: its config, its mode, and what became of its saves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflashpoint.settings import BY_NAME

if TYPE_CHECKING:
    from mlflashpoint.adapter.megatron_bridge.local_manager import MLFlashpointLocalCheckpointManager


@dataclass
class Job:
    """Begun when Bridge validates its config; a second set-up in one process begins another.

    Attributes:
        config: Bridge's ``ConfigContainer``.
        mode: setting ``bridge_mode``.
        durable_every: setting ``bridge_durable_every_n_saves``.
        active: local checkpoints of this job go to the memory store.
        own_interval: the recipe has said how often to make them.
        manager: the local manager in Bridge's checkpointing context, once it was made.
        deciding: Bridge is at its regular save of this step; others, before a rerun for example, are not replaced.
        only_in_memory: step whose save to memory, of ours, Bridge takes for its last; -1 if there was none.
    """

    config: Any
    mode: str
    durable_every: int
    active: bool = False
    own_interval: bool = False
    manager: MLFlashpointLocalCheckpointManager | None = None
    deciding: bool = False
    only_in_memory: int = -1

    @property
    def can_resume_adapters(self) -> bool:
        """Whether the job trains adapters, and Bridge's own question has found a version of them in memory."""
        adapters = getattr(self.config, "peft", None) is not None
        return self.active and adapters and self.manager is not None and self.manager.found != -1


_current: Job | None = None


def begin(config: Any) -> Job:
    """Raises SettingError for a malformed setting."""
    global _current
    if _current is None or _current.config is not config:
        _current = Job(config, setting("bridge_mode"), setting("bridge_durable_every_n_saves"))
    return _current


def current() -> Job | None:
    """The job that the agent saw begin in this process."""
    return _current


def current_for(config: Any) -> Job | None:
    """The same if it began with this config, or with this checkpoint config."""
    if _current is not None and (_current.config is config or _current.config.checkpoint is config):
        return _current
    return None


def setting(name: str) -> Any:
    """The value of a setting in this process's environment; raises SettingError."""
    return BY_NAME[name].read(os.environ)
