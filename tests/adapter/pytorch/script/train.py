"""A user's training script in plain PyTorch; it knows nothing of mlflashpoint.

It takes the newest folder below ``--folder``, saves every ``--every`` steps, and can be told to die, as a node does or
as a scheduler does it.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import time
import types
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("fsdp", "ddp", "single"), default="fsdp")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--die-by", choices=("SIGKILL", "SIGTERM"), default="SIGKILL")
    parser.add_argument("--die-making", default="", help="die when the folder of this name is about to be made")
    parser.add_argument("--save", choices=("sync", "thread", "process"), default="sync")
    parser.add_argument("--keep", type=int, default=0, help="newest folders kept")
    parser.add_argument("--one-name", action="store_true", help="save under one name")
    parser.add_argument("--apart", action="store_true", help="save model and optimizer apart")
    parser.add_argument("--end", choices=("destroy", "exit"), default="destroy")
    parser.add_argument("--full-from", type=int, default=0, help="rank 1's memory takes no more from this step on")
    parser.add_argument("--foreign", action="store_true", help="save as frameworks do")
    return parser.parse_args()


def die_making(name):
    """On a rank that is about to make the folder, as if a slow file system had let the node die meanwhile."""
    make = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if self.name == name:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        make(self, *args, **kwargs)

    Path.mkdir = mkdir


class Training(Stateful):
    def __init__(self, kind):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Dropout(0.1), torch.nn.Linear(7, 13))
        if kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        elif kind == "ddp":
            # The thread of async_save talks in the job's own group.
            group = dist.new_group(backend="gloo")
            self.model = torch.nn.parallel.DistributedDataParallel(self.model, process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.step = 0

    def train_step(self):
        self.model(torch.randn(4, 10)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # a key of its own for each rank: the others' are not to be had from a replicated state
        rng = {f"rng-{dist.get_rank() if dist.is_initialized() else 0}": torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, "step": self.step, "rng": rng}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(next(iter(state["rng"].values())))


class Part(Stateful):
    def __init__(self, training, names):
        self.training, self.names = training, names

    def state_dict(self):
        return {name: value for name, value in self.training.state_dict().items() if name in self.names}

    def load_state_dict(self, state):
        self.training.load_state_dict({**self.training.state_dict(), **state})


def digest(training):
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            list(map(add, value))
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(training.state_dict())
    return found.hexdigest()


def newest(folder):
    """As scripts do it: the folder with the highest number."""
    found = [path for path in folder.glob("step-*") if path.is_dir()] if folder.is_dir() else []
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def foreign_saves(training, folder):
    """A stand-in for a framework is a module of its name; the rest are calls that not all ranks make together."""
    save = types.FunctionType(called.__code__, {"__name__": "lightning.fabric.strategies.fsdp", "dcp": dcp})
    for step in (1, 2):
        save({"training": training}, checkpoint_id=folder / f"framework-{step}")
        group = dist.new_group(backend="gloo")
        dcp.save({"training": training}, checkpoint_id=folder / f"group-{step}", process_group=group)
        mine = folder / f"alone-{step}-{dist.get_rank()}"
        dcp.save({"step": step}, checkpoint_id=mine, no_dist=True)


def called(*args, **kwargs):
    return dcp.save(*args, **kwargs)


def main():
    arguments = options()
    warnings.filterwarnings("ignore")
    if arguments.kind != "single":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    if arguments.die_making:
        die_making(arguments.die_making)
    training = Training(arguments.kind)
    report = {"resumed": None, "digests": {}, "kept": None}
    if arguments.foreign:
        foreign_saves(training, arguments.folder)
        return
    where = newest(arguments.folder)
    if arguments.one_name:
        where = arguments.folder / "checkpoint" if (arguments.folder / "checkpoint").is_dir() else None
    parts = {"": {"training": training}}
    if arguments.apart:
        weights, rest = {"model"}, {"optimizer", "step", "rng"}
        parts = {"model": {"w": Part(training, weights)}, "optimizer": {"o": Part(training, rest)}}
    if where is not None:
        for name, state in parts.items():
            dcp.load(state, checkpoint_id=where / name)
        report["resumed"] = training.step
        report["digests"][training.step] = digest(training)
    pending = None
    while training.step < arguments.steps:
        training.train_step()
        if training.step == arguments.full_from and rank == 1:
            # What a full tmpfs does, on one rank alone: no file may grow beyond what the small durable ones need.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))
        report["digests"][training.step] = digest(training)
        if training.step % arguments.every == 0:
            folder = arguments.folder / ("checkpoint" if arguments.one_name else f"step-{training.step}")
            for name, state in parts.items():
                if arguments.save == "sync":
                    dcp.save(state, checkpoint_id=folder / name)
                else:
                    if pending is not None:
                        pending.result()
                    kind = getattr(dcp.state_dict_saver.AsyncCheckpointerType, arguments.save.upper())
                    pending = dcp.async_save(state, checkpoint_id=str(folder / name), async_checkpointer_type=kind)
            if arguments.keep and rank == 0:
                saved = sorted(arguments.folder.glob("step-*"), key=lambda path: int(path.name[5:]))
                for old in saved[: -arguments.keep]:
                    shutil.rmtree(old)
        if training.step == arguments.die_after:
            write(arguments, rank, report)
            time.sleep(1)
            if dist.is_initialized():
                dist.barrier()
            os.kill(os.getpid(), signal.Signals[arguments.die_by])
    if pending is not None:
        pending.result()
    write(arguments, rank, report)
    if dist.is_initialized() and arguments.end == "destroy":
        dist.destroy_process_group()


def write(arguments, rank, report):
    path = arguments.out / f"report-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(report))
    os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    main()
