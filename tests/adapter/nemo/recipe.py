"""An ordinary NeMo 2.0 recipe: a real GPT under MegatronStrategy. It imports ours only in the library form."""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import cuda_as_cpu

cuda_as_cpu.install()
cuda_as_cpu.absent(
    "nemo.collections.llm",
    "nemo.collections.llm.modelopt",
    "nemo.collections.llm.modelopt.model_utils",
    "nemo.collections.llm.modelopt.distill",
    "nemo.collections.llm.modelopt.distill.utils",
)

import lightning.pytorch as pl
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo import lightning as nl
from nemo.lightning import io
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction
from nemo.lightning.pytorch.callbacks import ModelTransform
from nemo.lightning.pytorch.optim import MegatronOptimizerModule

from tools.bridge_on_cpu import adam

cuda_as_cpu.after_import()
# the distributed optimizer can't resume with torch's own Adam
adam.install()

LENGTH, VOCABULARY, SAMPLES = 16, 128, 512
#: as a rank
ALL = -1


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict:
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "position_ids": torch.arange(LENGTH),
            "loss_mask": torch.ones(LENGTH),
            "attention_mask": torch.tril(torch.ones(1, LENGTH, LENGTH)) < 0.5,
        }


class Data(pl.LightningDataModule):
    """Keeps how many samples are consumed, as NeMo's own data modules do."""

    def __init__(self, micro: int, total: int) -> None:
        super().__init__()
        self.data_sampler = nl.MegatronDataSampler(LENGTH, micro_batch_size=micro, global_batch_size=total)
        self.init_global_step = 0

    def setup(self, stage: str = "") -> None:
        self.init_global_step = self.trainer.global_step
        self.data_sampler.init_global_step = self.init_global_step

    def train_dataloader(self):
        self.init_global_step = self.trainer.global_step
        self.data_sampler.init_global_step = self.init_global_step
        return WrappedDataLoader(mode="train", dataset=Samples(), batch_size=self.data_sampler.micro_batch_size)

    def state_dict(self) -> dict:
        done = self.trainer.global_step - self.init_global_step
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(done)}

    def load_state_dict(self, state: dict) -> None:
        self.data_sampler.init_consumed_samples = state["consumed_samples"]
        self.data_sampler.prev_consumed_samples = state["consumed_samples"]
        self.data_sampler.if_first_step = 1


class Model(pl.LightningModule, io.IOMixin):
    def __init__(self, distributed_optimizer: bool = False, hidden: int = 64) -> None:
        super().__init__()
        # with dropout, so that an exact resume needs the random number generators
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=hidden,
            num_attention_heads=4,
            ffn_hidden_size=128,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        )
        self.optim = MegatronOptimizerModule(
            config=OptimizerConfig(
                optimizer="adam", lr=1e-3, clip_grad=0.0, use_distributed_optimizer=distributed_optimizer
            )
        )
        self.optim.connect(self)
        self._reductions: dict = {}

    def configure_model(self, vp_stage=None) -> None:
        if not hasattr(self, "module"):
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            torch.manual_seed(0)
            self.module = GPTModel(
                config=self.config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=LENGTH,
            )

    def forward(self, tokens, position_ids, attention_mask, labels):
        return self.module(tokens, position_ids, attention_mask, labels=labels)

    def data_step(self, iterator):
        batch = next(iterator)
        return batch[0] if isinstance(batch, tuple) else batch

    def forward_step(self, batch):
        return self(batch["tokens"], batch["position_ids"], batch["attention_mask"], batch["labels"])

    def training_step(self, batch, index=None):
        return self.forward_step(batch)

    @property
    def training_loss_reduction(self):
        return self._reductions.setdefault("train", MaskedTokenLossReduction())


class Watcher(pl.Callback):
    def __init__(self, args) -> None:
        self.args = args
        self.started_at = -1
        self.consumed: list[int] = []

    def on_train_start(self, trainer, module) -> None:
        self.started_at = trainer.global_step

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if trainer.global_step == self.args.kill_at and self.args.kill_rank in (trainer.global_rank, ALL):
            time.sleep(self.args.settle_s)
            if self.args.kill == "RAISE":
                raise RuntimeError("the recipe failed")
            os.kill(os.getpid(), {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM}[self.args.kill])

    def on_train_end(self, trainer, module) -> None:
        if self.args.kill_end:
            time.sleep(self.args.settle_s)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, module, *rest) -> None:
        self.consumed.append(trainer.datamodule.state_dict()["consumed_samples"])


def parse(argv: list[str]):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--nodes", action="store_true", help="each rank is a node of its own")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--fully-reshardable", action="store_true")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--no-save-optimizer", action="store_true", help="durable checkpoints have no optimizer state")
    parser.add_argument("--durable-every", type=int, default=0)
    parser.add_argument("--context", action="store_true")
    parser.add_argument("--resume", action="store_true", help="with AutoResume, as NeMo recipes do")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--kill-rank", type=int, default=0, help="-1: every rank")
    parser.add_argument("--kill", choices=("KILL", "TERM", "RAISE"), default="KILL")
    parser.add_argument("--kill-end", action="store_true", help="when the training has ended, before its last save")
    parser.add_argument("--settle-s", type=float, default=0.5)
    parser.add_argument("--library", help="base container: use the library form")
    parser.add_argument("--library-sync", action="store_true", help="finish a memory save before training goes on")
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--always-save-context", action="store_true")
    parser.add_argument("--restore", help="checkpoint whose weights the training begins with")
    parser.add_argument("--transform", action="store_true", help="as PEFT does")
    parser.add_argument("--ckpt-format", default="torch_dist")
    parser.add_argument("--modelopt", action="store_true", help="as with a model that ModelOpt has converted")
    parser.add_argument("--slow-durable-s", type=float, default=0.0)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    if argv[0] == "--inside":
        import inside

        getattr(inside, argv[1])(Path(argv[-1]))
        return
    args = parse(argv)
    if args.nodes:
        be_a_node()
    torch.set_num_threads(1)
    pl.seed_everything(5)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=args.tp,
        ckpt_async_save=args.async_save,
        ckpt_save_optimizer=not args.no_save_optimizer,
        ckpt_parallel_load=False,
        ckpt_optim_fully_reshardable=args.fully_reshardable,
        save_ckpt_format=args.ckpt_format,
        pipeline_dtype=torch.float32,
        process_group_backend="gloo",
        # its printer gathers on rank 0 alone, which gloo does not survive
        replace_progress_bar=False,
    )
    watcher = Watcher(args)
    callbacks = [watcher]
    if args.durable_every:
        callbacks.append(
            nl.ModelCheckpoint(
                every_n_train_steps=args.durable_every,
                save_top_k=-1,
                monitor="step",
                mode="max",
                save_last=True,
                save_optim_on_train_end=True,
                filename="{step}",
                always_save_context=args.context,
                save_context_on_train_end=False,
            )
        )
    folder = Path(args.dir)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1 if args.nodes else ranks,
        num_nodes=ranks if args.nodes else 1,
        strategy=strategy,
        max_steps=args.steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(args.durable_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    nl.NeMoLogger(
        log_dir=str(folder), name="run", use_datetime_version=False, ckpt=None, update_logger_directory=False
    ).setup(trainer, resume_if_exists=args.resume)
    model = Model(args.distributed_optimizer, args.hidden)
    data = Data(2, 2 * ranks // args.tp)
    resume = None
    if args.resume or args.restore:
        resume = nl.AutoResume(
            resume_if_exists=args.resume,
            resume_ignore_no_checkpoint=True,
            restore_config=nl.RestoreConfig(path=args.restore, load_artifacts=False) if args.restore else None,
        )
    if args.transform:
        model.model_transform = lambda module: module
        trainer.callbacks.append(ModelTransform())
    if args.modelopt:
        # what NeMo does with such a model: it saves more than its CheckpointIO is given
        module = sys.modules["nemo.collections.llm.modelopt.model_utils"]
        module.save_modelopt_state = lambda model, path, checkpoint_io: checkpoint_io.save_sharded_strategy
    if args.slow_durable_s:
        slow_down_durable(args.slow_durable_s)
    if args.library:
        resume = use_library(args, trainer, resume)
    if resume is not None:
        resume.setup(trainer, model)
    # the folders that hold a version while the training goes on
    trainer.fit(model, data)
    Path(args.out, f"result-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(describe(trainer, model, watcher)))


def be_a_node() -> None:
    """Each rank is a node of its own, with a container of its own."""
    node = os.environ["RANK"]
    os.environ["MLFLASHPOINT_BASE_CONTAINER"] += f"/node-{node}"
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=node, MLFLASHPOINT_FAILURE_DOMAIN=f"node-{node}")


def digest(tensors) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def describe(trainer, model, watcher) -> dict:
    optimizer = trainer.optimizers[0]
    inner = getattr(optimizer, "mcore_optimizer", optimizer)
    states = [
        value
        for one in getattr(inner, "chained_optimizers", [inner])
        for state in one.optimizer.state.values()
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]
    return {
        "step": trainer.global_step,
        "started_at": watcher.started_at,
        "weights": digest(model.parameters()),
        "optimizer": digest(states),
        "states": len(states),
        "consumed": watcher.consumed,
        "files": sorted(path.name for path in Path(watcher.args.dir, "run", "checkpoints").glob("*")),
        "ckpt_path": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
        "io": type(trainer.strategy.checkpoint_io).__name__,
        "ours": sorted(name for name in sys.modules if name.startswith("mlflashpoint")),
    }


def slow_down_durable(seconds: float) -> None:
    """The durable storage is slow: writing takes ``seconds`` longer, in the process that writes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)

    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(slow)


def use_library(args, trainer, resume):
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint

    logging.basicConfig(level=logging.INFO)
    logging.getLogger("mlflashpoint").setLevel(logging.DEBUG)
    os.makedirs(args.library, exist_ok=True)
    trainer.callbacks.append(
        MLFlashpointCheckpointCallback(args.library, args.every, skip_every_n_steps=args.durable_every or None)
    )
    trainer.strategy.setup_environment()
    return wrap_trainer_and_auto_resume_with_mlflashpoint(
        trainer=trainer,
        flashpoint_base_container=args.library,
        async_save=not args.library_sync,
        default_auto_resume=resume,
        always_save_context=args.always_save_context,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
