"""An ordinary Lightning recipe; it imports ours only in the library form. Arguments choose the scenario."""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

# some start it without its folder on the path
sys.path.insert(0, str(Path(__file__).parent))
from ingredients import (
    PACKAGE,
    PLATEAUS,
    WIDTH,
    Batches,
    CountingIO,
    Foreign,
    L,
    Model,
    Passes,
    Scaled,
    ShardedModel,
    digest,
    make_strategy,
    optimizer_tensors,
)

ModelCheckpoint = importlib.import_module(f"{PACKAGE}.callbacks").ModelCheckpoint
OnExceptionCheckpoint = importlib.import_module(f"{PACKAGE}.callbacks").OnExceptionCheckpoint
Timer = importlib.import_module(f"{PACKAGE}.callbacks").Timer
BatchSizeFinder = importlib.import_module(f"{PACKAGE}.callbacks").BatchSizeFinder
LearningRateFinder = importlib.import_module(f"{PACKAGE}.callbacks").LearningRateFinder
CombinedLoader = importlib.import_module(f"{PACKAGE}.utilities").CombinedLoader
CSVLogger = importlib.import_module(f"{PACKAGE}.loggers").CSVLogger
AsyncCheckpointIO = importlib.import_module(f"{PACKAGE}.plugins.io").AsyncCheckpointIO

#: as a rank
ALL = -1


class Watcher(L.Callback):
    """Has state of many types, kills its process at a step, and records what happened."""

    def __init__(self, args) -> None:
        self.args = args
        self.count = 0
        self.saves = 0
        self.events: list[str] = []
        self.epochs: list[int] = []
        self.scores: list[list] = []
        self.ended: list[list] = []
        self.started_at = -1

    def state_dict(self) -> dict:
        state = {
            "count": self.count,
            "where": Path("/some/where"),
            "took": datetime.timedelta(seconds=3),
            "nested": [{"shape": torch.Size([2, 3])}, (1, 2.5), argparse.Namespace(a=1)],
        }
        if self.count == self.args.foreign_at and int(os.environ.get("LOCAL_RANK", 0)) == self.args.foreign_rank:
            state["foreign"] = Foreign()
        return state

    def load_state_dict(self, state: dict) -> None:
        assert state["where"] == Path("/some/where") and state["took"] == datetime.timedelta(seconds=3)
        assert state["nested"] == [{"shape": torch.Size([2, 3])}, (1, 2.5), argparse.Namespace(a=1)]
        self.count = state["count"]
        self.events.append(f"restored {self.count}")

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        self.saves += 1

    def on_train_start(self, trainer, module) -> None:
        self.started_at = trainer.global_step

    def on_train_epoch_start(self, trainer, module) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if trainer.global_step == self.args.kill_at and self.args.kill_rank in (trainer.global_rank, ALL):
            if self.args.kill == "KILL":
                # the version must have been settled, or the scenario would depend on the machine's pace
                time.sleep(self.args.settle_s)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.args.kill in ("TERM", "INT"):
                os.kill(os.getpid(), {"TERM": signal.SIGTERM, "INT": signal.SIGINT}[self.args.kill])
            if self.args.kill == "TIME":
                # the time of a Timer is over
                for timer in trainer.callbacks:
                    if isinstance(timer, Timer):
                        timer._start_time["train"] -= 1e6
            if self.args.kill == "RAISE":
                raise RuntimeError("the recipe failed")
            if self.args.kill == "EXIT":
                raise importlib.import_module(f"{PACKAGE}.utilities.exceptions")._TunerExitException

    def on_train_batch_end(self, trainer, module, *rest) -> None:
        if self.args.inner_fit_at == trainer.global_step:
            fit_within(self.args)
        if self.args.stall_at == trainer.global_step and self.args.stall_rank in (trainer.global_rank, ALL):
            time.sleep(self.args.stall_s)
        if self.args.direct_at is not None and trainer.global_step == self.args.direct_at:
            trainer.save_checkpoint(f"{self.args.library}/step-{trainer.global_step}_ckpt")
        # counted per optimizer step, however many batches one takes
        self.count = trainer.global_step

    def on_validation_start(self, trainer, module) -> None:
        self.events.append(f"validated {trainer.global_step}")
        if trainer.global_step == self.args.kill_validation:
            time.sleep(self.args.settle_s)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer, module) -> None:
        self.scores.append([trainer.global_step, trainer.callback_metrics["score"].item()])

    def die_behind(self, trainer, hook: str) -> None:
        """The kill that comes when the last step is trained and saved to memory."""
        self.ended.append([hook, trainer.global_step, trainer.current_epoch])
        last = self.args.steps if self.args.epochs is None else self.args.epochs * trainer.num_training_batches
        if self.args.kill_behind == hook and trainer.global_step == last:
            time.sleep(self.args.settle_s)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer, module) -> None:
        self.die_behind(trainer, "train")

    def on_train_epoch_end(self, trainer, module) -> None:
        self.die_behind(trainer, "epoch")
        if "mean" in trainer.callback_metrics:
            self.scores.append([trainer.global_step, trainer.callback_metrics["mean"].item()])


class Final(L.Callback):
    """Makes the recipe's last durable checkpoint, as NeMo's ModelCheckpoint and Lightning's from 2.6 on do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, module) -> None:
        trainer.save_checkpoint(self.folder / "final.ckpt")


def parse(argv: list[str]):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--dir", required=True, help="the recipe's own folder, the same after a restart")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--durable-every", type=int, default=0)
    parser.add_argument("--durable-also", type=int, default=0, help="the same for a second ModelCheckpoint")
    parser.add_argument("--durable-epochs", type=int, default=0)
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--top-k", type=int, default=-1, help="durable checkpoints that are kept")
    parser.add_argument("--on-exception", action="store_true", help="a checkpoint when the training is broken off")
    parser.add_argument("--validate-every", type=int, default=0)
    parser.add_argument("--ckpt-path")
    parser.add_argument("--stateless", action="store_true", help="a data loader that can't be resumed")
    parser.add_argument("--passes", action="store_true", help="a data loader that goes on once, and then begins anew")
    parser.add_argument("--cycle", action="store_true", help="two such loaders, of which the shorter begins anew")
    parser.add_argument("--limit", type=json.loads, help="how much of the data an epoch has, as number or fraction")
    parser.add_argument("--overfit", type=json.loads, default=0.0)
    parser.add_argument("--schedule", choices=("step", "epoch", "estimated", *PLATEAUS), default="step")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--kill-rank", type=int, default=0, help="-1: every rank")
    parser.add_argument("--kill", choices=("KILL", "TERM", "INT", "RAISE", "EXIT", "TIME"), default="KILL")
    parser.add_argument("--kill-validation", type=int, help="step at whose validation the process is killed")
    parser.add_argument("--kill-behind", choices=("epoch", "train"), help="the end at which the process is killed")
    parser.add_argument("--final", action="store_true", help="the recipe saves when the training has ended")
    parser.add_argument("--settle-s", type=float, default=0.5)
    parser.add_argument("--stall-at", type=int, help="step at whose end a rank stands still")
    parser.add_argument("--stall-rank", type=int, default=0)
    parser.add_argument("--stall-s", type=float, default=60)
    parser.add_argument("--foreign-at", type=int)
    parser.add_argument("--foreign-rank", type=int, default=0)
    parser.add_argument("--foreign-hparams", action="store_true")
    parser.add_argument("--io", choices=("default", "custom", "async", "own"), default="default")
    parser.add_argument("--max-time")
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--more-epochs", type=int, help="the same Trainer fits once more, for so many")
    parser.add_argument("--inner-fit-at", type=int, help="another Trainer fits within this one")
    parser.add_argument("--fast-dev-run", action="store_true")
    parser.add_argument("--lr-find", choices=("look", "set"))
    parser.add_argument("--batch-size-find", action="store_true")
    parser.add_argument("--best", action="store_true", help="a durable checkpoint of the best score")
    parser.add_argument("--load-fails", type=int, default=0, help="loads that fail for lack of memory")
    parser.add_argument("--load-fails-rank", type=int, default=0)
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--library", help="base container: use the library form")
    parser.add_argument("--library-durable", help="what the recipe's own AutoResume finds")
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--skip-every", type=int)
    parser.add_argument("--direct-at", type=int, help="save to memory by the path alone at that step")
    return parser.parse_args(argv)


def trainer_for(args, watcher, io, folder: Path):
    callbacks = [watcher]
    if args.durable_every or args.durable_epochs:
        callbacks.append(
            ModelCheckpoint(
                dirpath=folder / "durable",
                filename="{step}",
                every_n_train_steps=args.durable_every or None,
                every_n_epochs=args.durable_epochs or None,
                save_top_k=args.top_k,
                save_last=True,
                save_weights_only=args.weights_only,
            )
        )
    if args.durable_also:
        callbacks.append(ModelCheckpoint(folder / "also", every_n_train_steps=args.durable_also, save_top_k=-1))
    if args.on_exception:
        callbacks.append(OnExceptionCheckpoint(folder, "broken-off"))
    if args.lr_find:
        # its own restore does not trust what this recipe's callback puts into a file
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        callbacks.append(LearningRateFinder(num_training_steps=20, update_attr=args.lr_find == "set", attr_name="rate"))
    if args.batch_size_find:
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        callbacks.append(BatchSizeFinder(init_val=2, max_trials=3))
    if args.final:
        callbacks.append(Final(folder))
    if args.best:
        callbacks.append(ModelCheckpoint(folder / "best", monitor="score", save_top_k=1))
    ranks = int(os.environ.get("RECIPE_DEVICES", os.environ.get("WORLD_SIZE", 1)))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return L.Trainer(
        accelerator="cpu",
        strategy=make_strategy(args.strategy, ranks),
        devices=per_node,
        num_nodes=ranks // per_node,
        max_steps=args.steps,
        fast_dev_run=args.fast_dev_run,
        max_epochs=args.epochs,
        limit_train_batches=args.limit,
        overfit_batches=args.overfit,
        max_time=args.max_time,
        accumulate_grad_batches=args.accumulate,
        callbacks=callbacks,
        plugins=[] if io is None else [io],
        enable_checkpointing=bool(
            args.durable_every or args.durable_epochs or args.durable_also or args.on_exception or args.best
        ),
        logger=CSVLogger(folder / "logs", name="", version=f"{os.getpid()}"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=2 if args.validate_every else 0,
        val_check_interval=args.validate_every or None,
        check_val_every_n_epoch=None if args.validate_every else 1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )


def main(argv: list[str]) -> None:
    if argv[0] == "--inside":
        import inside

        getattr(inside, argv[1])(Path(argv[-1]))
        return
    args = parse(argv)
    torch.set_num_threads(1)
    L.seed_everything(3)
    folder = Path(args.dir)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    fits = []
    for number in range(args.fits):
        watcher = Watcher(args if number == args.fits - 1 else parse([*argv, "--kill-at", "-1"]))
        inner = CountingIO(args.io == "own", args.load_fails if rank == args.load_fails_rank else 0)
        io = {"default": None, "custom": inner, "own": inner, "async": AsyncCheckpointIO(inner)}[args.io]
        trainer = trainer_for(args, watcher, io, folder)
        sharded = args.strategy in ("fsdp", "model_parallel")
        if sharded and args.ckpt_path:
            # the path that ModelCheckpoint keeps is nothing that Lightning's load of a folder trusts
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        kind = ShardedModel if sharded else Scaled if args.batch_size_find else Model
        model = kind(args.width, Foreign() if args.foreign_hparams else None)
        model.schedule = args.schedule
        if args.zero:
            use_zero(model)
        if args.library:
            use_library(args, trainer)
        # from 2.6 on Lightning refuses to load what this recipe's callback puts into a file unless told so
        trusting = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
        loader = (Passes if args.passes else Batches)(rank)
        if args.stateless:
            loader = torch.utils.data.DataLoader(loader.data, batch_size=4)
        if args.cycle:
            loader = CombinedLoader([loader, Passes(rank + 1, 6)], "max_size_cycle")
        path = args.ckpt_path and args.ckpt_path.replace("{rank}", str(rank))
        # Each pass begins anew, and draws a random number.
        validation = torch.utils.data.DataLoader(Batches(rank).data, batch_size=4)
        trainer.fit(model, None if args.batch_size_find else loader, validation, ckpt_path=path, **trusting)
        if args.more_epochs:
            trainer.fit_loop.max_epochs += args.more_epochs
            trainer.fit(model, loader, validation, ckpt_path=path, **trusting)
        if args.validate_every:
            trainer.validate(model, Batches(rank))
        fits.append(describe(trainer, model, watcher, inner))
    Path(args.out, f"result-{rank}.json").write_text(json.dumps({"fits": fits, **fits[-1]}))


def describe(trainer, model, watcher, inner) -> dict:
    scores = [getattr(callback, "best_model_score", None) for callback in trainer.checkpoint_callbacks]
    metrics = Path(trainer.logger.log_dir, "metrics.csv") if trainer.is_global_zero and trainer.logger.log_dir else None
    logged = []
    if metrics and metrics.exists():
        names, *rows = [line.split(",") for line in metrics.read_text().splitlines()]
        logged = [int(row[names.index("step")]) for row in rows]
    return {
        "release": importlib.import_module(PACKAGE.partition(".")[0]).__version__,
        "step": trainer.global_step,
        "started_at": watcher.started_at,
        "epoch": trainer.current_epoch,
        "weights": digest(model.parameters()),
        "buffers": digest(model.buffers()),
        "optimizer": digest(optimizer_tensors(trainer.optimizers[0])),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "count": watcher.count,
        "saves": watcher.saves,
        "events": watcher.events,
        "epochs": watcher.epochs,
        "scores": watcher.scores,
        "ended": watcher.ended,
        "files": durable_files(Path(trainer.default_root_dir)),
        "best": [float(score) for score in scores if score is not None],
        "batch_size": getattr(model, "batch_size", None),
        "rate": model.rate,
        "logged": logged,
        "calls": inner.calls,
        "ckpt_path": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "ours": sorted(name for name in sys.modules if name.startswith("mlflashpoint")),
    }


def durable_files(folder: Path) -> dict[str, list]:
    """Step, epoch and weights of each of the recipe's own checkpoints; of a damaged one, what it raises."""
    paths = sorted(path for path in folder.rglob("*.ckpt") if path.is_file())
    return {str(path.relative_to(folder)): durable_file(path) for path in paths}


def durable_file(path: Path) -> list:
    try:
        content = torch.load(path, map_location="cpu", weights_only=False)
        return [content["global_step"], content["epoch"], digest(content["state_dict"].values())]
    except Exception as error:
        return [type(error).__name__]


def fit_within(args) -> None:
    state = torch.get_rng_state()
    inner = parse(["--out", args.out, "--dir", f"{args.dir}/inner", "--steps", "6", "--kill-at", "-1"])
    trainer = trainer_for(inner, Watcher(inner), None, Path(inner.dir))
    if args.library:
        inner.library, inner.every = args.library, 2
        use_library(inner, trainer)
    trainer.fit(Model(), Batches(0))
    assert trainer.global_step == 6
    torch.set_rng_state(state)


class Resume:
    """What a recipe without NeMo may have in the place of its AutoResume: names a checkpoint once one was made."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get_trainer_ckpt_path(self, model=None):
        return self.path if Path(self.path).parent.exists() else None

    def setup(self, trainer, model=None) -> None:
        trainer.ckpt_path = self.get_trainer_ckpt_path()


def use_zero(model) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model.configure_optimizers = lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)


def use_library(args, trainer) -> None:
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint

    logging.basicConfig(level=logging.INFO)
    logging.getLogger("mlflashpoint").setLevel(logging.DEBUG)
    trainer.callbacks.append(MLFlashpointCheckpointCallback(args.library, args.every, args.skip_every))
    if args.strategy != "model_parallel":
        # that one does it within fit alone
        trainer.strategy.setup_environment()
    own = Resume(args.library_durable) if args.library_durable else None
    resume = wrap_trainer_and_auto_resume_with_mlflashpoint(
        trainer, args.library, async_save=True, default_auto_resume=own
    )
    resume.setup(trainer)


if __name__ == "__main__":
    main(sys.argv[1:])
