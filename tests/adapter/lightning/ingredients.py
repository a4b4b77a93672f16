"""What the Lightning recipe is made of: data, models, strategies, a CheckpointIO of its own, and digests of tensors."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
from pathlib import Path

import torch

PACKAGE = os.environ.get("RECIPE_PACKAGE", "lightning.pytorch")
L = importlib.import_module(PACKAGE)
FABRIC = "lightning.fabric" if PACKAGE == "lightning.pytorch" else "lightning_fabric"
TorchCheckpointIO = importlib.import_module(f"{FABRIC}.plugins.io.torch_io").TorchCheckpointIO

#: what a ReduceLROnPlateau looks at, and when
PLATEAUS = {
    "plateau": {"monitor": "loss"},
    "score": {"monitor": "score"},
    "score by steps": {"monitor": "score", "interval": "step", "frequency": 12},
    "mean": {"monitor": "mean"},
}

WIDTH = 8
SAMPLES = 64


class Batches:
    """A data loader that can be resumed: its position is part of the checkpoint."""

    def __init__(self, rank: int, batch: int = 4) -> None:
        generator = torch.Generator().manual_seed(7 + rank)
        self.data = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.batch = batch
        self.position = 0

    def __len__(self) -> int:
        return SAMPLES // self.batch

    def __iter__(self):
        self.position %= len(self)
        while self.position < len(self):
            start = self.position * self.batch
            self.position += 1
            yield self.data[start : start + self.batch]

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


class Passes(Batches):
    """The same as torchdata's StatefulDataLoader does it: each pass begins anew, but for the first one after a load."""

    loaded = 0

    def __iter__(self):
        self.position, self.loaded = self.loaded, 0
        while self.position < len(self):
            start = self.position * self.batch
            self.position += 1
            yield self.data[start : start + self.batch]

    def state_dict(self) -> dict:
        return {"position": self.loaded or self.position}

    def load_state_dict(self, state: dict) -> None:
        self.loaded = state["position"]


class Model(L.LightningModule):
    schedule = "step"
    rate = 1e-2

    def __init__(self, width: int = WIDTH, settings: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.25),
            torch.nn.Linear(width, 1),
        )

    def training_step(self, batch, index):
        loss = self.net(torch.cat(batch) if isinstance(batch, list) else batch).pow(2).mean()
        self.log("loss", loss)
        if self.schedule == "mean":
            self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("score", self.net(batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.rate)
        if self.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        if self.schedule == "estimated":
            # asks for the length of the training, for which Lightning sets the loader up
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        if self.schedule in PLATEAUS:
            # no metric ever improves by that much: each step but the first halves the rate
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, threshold=1e9, threshold_mode="abs"
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **PLATEAUS[self.schedule]}}
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9], 0.5), "interval": "step"}
        ]


class ShardedModel(Model):
    """For FSDP and ModelParallel: no batch norm, wrapped in ``configure_model``."""

    def __init__(self, width: int = WIDTH, settings: object = None) -> None:
        super().__init__(width, settings)
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.Dropout(0.25), torch.nn.Linear(width, 1))

    def configure_model(self) -> None:
        strategy = type(self.trainer.strategy).__name__
        if strategy == "ModelParallelStrategy":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Foreign:
    """An object that no checkpoint of ours may hold."""


class CountingIO(TorchCheckpointIO):
    """The recipe's own CheckpointIO, with a file format of its own if asked to."""

    def __init__(self, own_format: bool = False, fails: int = 0) -> None:
        self.calls: list[str] = []
        self.own_format = own_format
        #: how many loads fail for lack of memory
        self.fails = fails

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append(f"save {Path(path).name}")
        if self.own_format:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            torch.save(checkpoint, path, _use_new_zipfile_serialization=False)
            return
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path, *args, **kwargs):
        self.calls.append(f"load {Path(path).name}")
        if self.fails:
            self.fails -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return (
            torch.load(path, weights_only=False) if self.own_format else super().load_checkpoint(path, *args, **kwargs)
        )


class Scaled(Model):
    """Brings its data along, in batches of a size that can be searched for."""

    batch_size = 2

    def train_dataloader(self):
        return Batches(0, self.batch_size)


def digest(tensors) -> str:
    """One hash of many tensors, to the bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def optimizer_tensors(optimizer):
    # a sharded optimizer gives only its own part away
    optimizer = getattr(optimizer, "optim", optimizer)
    for state in optimizer.state_dict()["state"].values():
        yield from (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))


def make_strategy(name: str, ranks: int):
    strategies = importlib.import_module(f"{PACKAGE}.strategies")
    if name == "fsdp":
        # Lightning and torch take a CPU only if told so; what a checkpoint holds stays FSDPStrategy's own
        class OnCPU(strategies.FSDPStrategy):
            def _setup_model(self, model):
                from torch.distributed.fsdp import FullyShardedDataParallel

                return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

        return OnCPU(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded")
    if name == "model_parallel":
        return strategies.ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if name == "strange":

        class StrangeStrategy(strategies.SingleDeviceStrategy):
            def save_checkpoint(self, checkpoint, filepath, storage_options=None):
                super().save_checkpoint(checkpoint, filepath, storage_options)

        return StrangeStrategy(device=torch.device("cpu"))
    if name == "deepspeed":
        # the package is not there; like the real one, this writes through an engine of its own
        class DeepSpeedStrategy(strategies.DDPStrategy):
            def save_checkpoint(self, checkpoint, filepath, storage_options=None):
                raise NotImplementedError

        return DeepSpeedStrategy()
    if name == "xla":
        # the real one overrides no method that decides what a checkpoint holds
        class SingleDeviceXLAStrategy(strategies.SingleDeviceStrategy):
            pass

        return SingleDeviceXLAStrategy(device=torch.device("cpu"))
    return name
