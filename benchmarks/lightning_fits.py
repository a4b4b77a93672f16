"""The fits that ``benchmarks.lightning`` measures: a warm process that fits on request.

python -m benchmarks.lightning_fits PACKAGE
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from typing import Any


def work(package: str) -> None:
    """Answer one line of JSON per line of JSON on standard input."""
    import importlib

    lightning = importlib.import_module(package)
    for line in sys.stdin:
        job = json.loads(line)
        answer = {"blocking": fit_blocking, "hooks": fit_hooks, "overhead": fit_overhead}[job.pop("what")](
            lightning, **job
        )
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _trainer(lightning: Any, steps: int, *callbacks: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit_blocking(lightning: Any, state: str, rounds: int) -> dict[str, Any]:
    import torch

    from benchmarks.states import STATES

    os.environ["MLFLASHPOINT_SAVE_EVERY_N_STEPS"] = "2"
    content = STATES[state]()
    path = f"/dev/shm/benchmark-lightning-{os.getpid()}.ckpt"
    memory: list[float] = []
    own: list[float] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = torch.nn.Linear(4, 1)
            self.large = torch.nn.ParameterList(torch.nn.Parameter(value) for value in content["model"].values())

        def training_step(self, batch: Any, index: int) -> Any:
            return self.small(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-3)
            # Without a gradient a parameter is left as it is: a step costs nothing, its state is there all the same.
            for parameter, kept in zip(self.large, content["optimizer"]["state"].values(), strict=True):
                step = torch.as_tensor(kept.pop("step"), dtype=torch.float32)
                optimizer.state[parameter] = {"step": step, **kept}
            return optimizer

        def on_train_batch_end(self, *args: Any) -> None:
            # comes behind all callbacks, ours too
            if self.trainer.global_step % 2 == 0:
                memory.append(time.perf_counter() - clock.began)

    class Clock(lightning.Callback):
        began = 0.0

        def on_train_batch_start(self, *args: Any) -> None:
            # the background work of the last save is no part of the next figure
            time.sleep(0.6)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step % 2 == 1:
                began = time.perf_counter()
                trainer.save_checkpoint(path)
                own.append(time.perf_counter() - began)
                os.unlink(path)
            self.began = time.perf_counter()

    clock = Clock()
    batches = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=1)
    # the first round of each makes files and buffers
    _trainer(lightning, 2 * (rounds + 1), clock).fit(Model(), batches)
    return {"memory": memory, "own": own}


def fit_overhead(lightning: Any, steps: int, width: int, empty: bool) -> dict[str, Any]:
    import torch

    os.environ["MLFLASHPOINT_SAVE_EVERY_N_STEPS"] = "1000000"
    marks: list[float] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    class Clock(lightning.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            marks.append(time.perf_counter())

    batches = torch.utils.data.DataLoader(torch.randn(32 * 50, width), batch_size=32)
    _trainer(lightning, steps, Clock(), *([lightning.Callback()] if empty else [])).fit(Model(), batches)
    took = sorted(after - before for before, after in itertools.pairwise(marks))
    return {"median_us": statistics.median(took) * 1e6}


def fit_hooks(lightning: Any, pairs: int, steps: int) -> dict[str, Any]:
    """Seconds per step of the callback hooks that Lightning calls at each, by whose callback there is."""
    import importlib

    import torch

    os.environ["MLFLASHPOINT_SAVE_EVERY_N_STEPS"] = "1000000"
    call = importlib.import_module(f"{lightning.__name__}.trainer.call")._call_callback_hooks
    found: dict[str, list[float]] = {"ours": [], "empty": [], "none": []}

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    class Probe(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step != 5:
                return
            before = list(trainer.callbacks)
            ours = [one for one in before if type(one).__module__.startswith("mlflashpoint")]
            assert len(ours) == 1
            arms = {"ours": ours, "empty": [lightning.Callback()], "none": []}
            names = list(arms)
            try:
                for number in range(3 * pairs):
                    name = names[(number + number // 3) % 3]
                    trainer.callbacks[:] = arms[name]
                    began = time.perf_counter()
                    for _ in range(steps):
                        call(trainer, "on_train_batch_start", None, 0)
                        call(trainer, "on_before_zero_grad", None)
                        call(trainer, "on_before_backward", None)
                        call(trainer, "on_after_backward")
                        call(trainer, "on_before_optimizer_step", None)
                        call(trainer, "on_train_batch_end", None, None, 0)
                    found[name].append((time.perf_counter() - began) / steps)
            finally:
                trainer.callbacks[:] = before

    _trainer(lightning, 6, Probe()).fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=1))
    return found


if __name__ == "__main__":
    work(sys.argv[1])
