"""Which functions of Lightning are wrapped, for both names of the package."""

from __future__ import annotations

from mlflashpoint.agent.patch import Patch

_HOOKS = "mlflashpoint.adapter.lightning.hooks"
_TESTED = ">=2.4,<2.7"


def _patches(package: str, distribution: str) -> tuple[Patch, ...]:
    def patch(name: str, module: str, target: str, **kind: str) -> Patch:
        return Patch(
            f"{distribution}.{name}",
            "lightning",
            f"{package}.{module}",
            target,
            "lightning_enabled",
            (distribution, _TESTED),
            **kind,
        )

    connectors = "trainer.connectors"
    return (
        patch("run", "trainer.trainer", "Trainer._run", around=f"{_HOOKS}:run"),
        patch("save", "trainer.trainer", "Trainer.save_checkpoint", around=f"{_HOOKS}:save_checkpoint"),
        patch(
            "callbacks",
            f"{connectors}.callback_connector",
            "_CallbackConnector._attach_model_callbacks",
            after=f"{_HOOKS}:callbacks_attached",
        ),
        patch(
            "resume",
            f"{connectors}.checkpoint_connector",
            "_CheckpointConnector.resume_start",
            around=f"{_HOOKS}:resume_start",
        ),
        patch(
            "ckpt_path",
            f"{connectors}.checkpoint_connector",
            "_CheckpointConnector._select_ckpt_path",
            after=f"{_HOOKS}:ckpt_path_selected",
        ),
    )


PATCHES = (
    *_patches("lightning.pytorch", "lightning"),
    *_patches("pytorch_lightning", "pytorch-lightning"),
)
