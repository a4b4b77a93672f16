"""Checks that need NeMo imported: each function runs on the ranks of a job of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import recipe
import torch
from nemo import lightning as nl
from nemo.lightning.io.pl import MegatronCheckpointIO


def routes_by_path(folder: Path) -> None:
    """A CheckpointIO in front of NeMo's own: both saves go where their path says, and load what was saved."""
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    class Probe(recipe.pl.Callback):
        def on_train_batch_end(self, trainer, module, *rest) -> None:
            if trainer.global_step == 2:
                for path in (base / "step-2_ckpt", folder.parent / "durable.ckpt"):
                    trainer.save_checkpoint(path)
                trainer.strategy.checkpoint_io.session.runtime.flush()
                check(trainer)

    @torch.no_grad()
    def check(trainer) -> None:
        io = trainer.strategy.checkpoint_io
        expected = trainer.strategy.sharded_state_dict_metadata
        assert expected["distrib_optim_sharding_type"] == "dp_reshardable"
        loaded = []
        for path in (base / "step-2_ckpt", folder.parent / "durable"):
            assert io.load_content_metadata(path) == expected
            template = {"state_dict": trainer.strategy.megatron_parallel.sharded_state_dict()}
            before = {name: value.data.clone() for name, value in module_tensors(template)}
            for _, value in module_tensors(template):
                value.data.zero_()
            found = io.load_checkpoint(path, sharded_state_dict=template)
            assert found["global_step"] == 2 and found["loops"]["fit_loop"]
            trainer.strategy.load_model_state_dict(found)
            template = {"state_dict": trainer.strategy.megatron_parallel.sharded_state_dict()}
            assert all(torch.equal(value.data, before[name]) for name, value in module_tensors(template))
            loaded.append(sorted(set(found) - {"sharded_state_dict", "content_metadata"}))
        assert loaded[0] == loaded[1], loaded
        assert not (base / "step-2_ckpt" / "weights").exists()
        checked.append(True)

    def module_tensors(template):
        return [(name, value) for name, value in template["state_dict"].items() if isinstance(value.data, torch.Tensor)]

    checked: list[bool] = []
    # both ranks are on one node
    base = Path("/dev/shm") / f"mlf-inside-{os.environ['MASTER_PORT']}"
    base.mkdir(mode=0o700, exist_ok=True)
    try:
        strategy = nl.MegatronStrategy(
            pipeline_dtype=torch.float32,
            process_group_backend="gloo",
            replace_progress_bar=False,
            ckpt_async_save=False,
            ckpt_parallel_load=False,
        )
        trainer = nl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=3,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[Probe(), MLFlashpointCheckpointCallback(base, 100)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.strategy.setup_environment()
        wrap(trainer, base, async_save=True)
        io = trainer.strategy.checkpoint_io
        assert isinstance(io.fallback, MegatronCheckpointIO) and io.save_ckpt_format == "torch_dist"
        wrap(trainer, base, async_save=True)
        assert trainer.strategy.checkpoint_io.fallback is io.fallback, "wrapping twice wraps once"
        trainer.fit(recipe.Model(distributed_optimizer=True), recipe.Data(2, 4))
        assert checked
    finally:
        shutil.rmtree(base, ignore_errors=True)
