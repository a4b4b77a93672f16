"""Which functions of NeMo 2.0 are wrapped, beside those of the Lightning below it (``agent.lightning``)."""

from __future__ import annotations

from mlflashpoint.agent.patch import Patch

PATCHES = (
    Patch(
        "nemo.selective_restore",
        "nemo",
        "nemo.lightning.pytorch.strategies.megatron_strategy",
        "MegatronStrategy.selective_restore",
        "nemo_enabled",
        ("nemo-toolkit", ">=2.7,<2.8"),
        around="mlflashpoint.adapter.nemo.hooks:selective_restore",
    ),
    Patch(
        "nemo.auto_resume",
        "nemo",
        "nemo.lightning.resume",
        "AutoResume._find_trainer_ckpt_path",
        "nemo_enabled",
        ("nemo-toolkit", ">=2.7,<2.8"),
        around="mlflashpoint.adapter.nemo.hooks:find_trainer_ckpt_path",
    ),
)
