"""What memory checkpoints cost a Lightning job, each figure against a yardstick measured in the same run.

    python -m benchmarks.lightning [--rounds 9] [--pairs 30] [--states llm,small] [--package NAME] [--json FILE]

Blocking: one process, one fit; in turn a step saves to memory and the next one calls Lightning's own
``Trainer.save_checkpoint`` to tmpfs. What counts is how long the training stands still, from capturing the state on.
Hooks: in one process, the callback hooks that Lightning calls at each step, in turn with our callback, with an empty
one, and with none; no save is due.
Overhead: two warm processes, with the agent and without it, fit in turn with no save due; the difference per step is
given with its 95 % interval, and beside it that of two processes that both have no agent.
The exit code is 1 if a promise is missed. Needs ``tools/envs/lightning.sh``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OVERLAYS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
#: Lightning's own save to tmpfs takes at least this many times as long
PROMISE = 5.0
#: what our callback adds to a step is at most this many times what an empty one of Lightning's adds
PROMISE_HOOKS = 1.5


class Worker:
    """A warm process that fits on request; the agent is there if ``base`` is."""

    def __init__(self, package: str, base: Path | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="benchmark-lightning-"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLASHPOINT_")}
        path = f"{ROOT / '.envs' / 'lightning' / OVERLAYS[package]}:{ROOT}"
        environ.update(PYTHONPATH=path, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        command = [sys.executable, *(["-m", "mlflashpoint.run"] if base else []), "-m", "benchmarks.lightning"]
        command += ["--worker", package]
        if base is not None:
            environ.update(
                MLFLASHPOINT_ENABLED="1",
                MLFLASHPOINT_JOB_ID="benchmark",
                MLFLASHPOINT_BASE_CONTAINER=str(base),
                MLFLASHPOINT_LOG_LEVEL="WARNING",
            )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            cwd=self.folder,
            text=True,
        )

    def ask(self, **job: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the worker died")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


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


def _trainer(lightning: Any, steps: int, callback: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[callback],
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


def fit_overhead(lightning: Any, steps: int, width: int) -> dict[str, Any]:
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
    _trainer(lightning, steps, Clock()).fit(Model(), batches)
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


def blocking(package: str, states: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for state in states:
        base = Path(f"/dev/shm/benchmark-lightning-{os.getpid()}")
        worker = Worker(package, base)
        try:
            answer = worker.ask(what="blocking", state=state, rounds=rounds)
        finally:
            worker.close()
            shutil.rmtree(base, ignore_errors=True)
        memory, own = answer["memory"], answer["own"]
        medians = statistics.median(memory[1:]), statistics.median(own[1:])
        found[state] = {
            "memory_ms": [round(value * 1e3, 2) for value in memory],
            "own_ms": [round(value * 1e3, 2) for value in own],
            "ratio": round(medians[1] / medians[0], 2),
        }
        print(
            f"{state:6} blocking per memory save {medians[0] * 1e3:8.1f} ms, Lightning's own save to tmpfs "
            f"{medians[1] * 1e3:8.1f} ms: {medians[1] / medians[0]:.1f} times (promised {PROMISE:g}), first "
            f"{memory[0] * 1e3:.0f} and {own[0] * 1e3:.0f} ms"
        )
    return found


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval, from the spread of the differences."""
    mean = statistics.fmean(differences)
    half = 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def hooks(package: str, pairs: int) -> dict[str, Any]:
    base = Path(f"/dev/shm/benchmark-lightning-{os.getpid()}")
    worker = Worker(package, base)
    try:
        answer = worker.ask(what="hooks", pairs=10 * pairs, steps=100)
    finally:
        worker.close()
        shutil.rmtree(base, ignore_errors=True)
    row: dict[str, Any] = {}
    least = {name: min(values) * 1e6 for name, values in answer.items()}
    for name in ("ours", "empty"):
        differences = [(one - other) * 1e6 for one, other in zip(answer[name], answer["none"], strict=True)]
        mean, low, high = interval(differences)
        row[name] = [round(value, 2) for value in (mean, low, high)]
        # Whatever else runs on the machine only adds to a round: the least of each tells most.
        row[f"{name}_us"] = round(least[name] - least["none"], 2)
        print(
            f"hooks of a step: {name:5} {row[f'{name}_us']:+.2f} us at the least, mean {mean:+.2f} us, 95 % interval "
            f"[{low:+.2f}, {high:+.2f}] us"
        )
    row["part"] = round(row["ours_us"] / row["empty_us"], 2)
    print(f"hooks of a step: ours take {row['part']:g} times what an empty callback takes (promised {PROMISE_HOOKS:g})")
    return row


def overhead(package: str, pairs: int) -> dict[str, Any]:
    base = Path(f"/dev/shm/benchmark-lightning-{os.getpid()}")
    workers = {"agent": Worker(package, base), "none": Worker(package, None), "control": Worker(package, None)}
    found: dict[str, Any] = {}
    try:
        for width, steps in ((64, 300), (1024, 60)):
            job = {"what": "overhead", "width": width, "steps": steps}
            for worker in workers.values():
                worker.ask(**job)
            rounds: list[dict[str, float]] = []
            for number in range(pairs):
                names = list(workers)
                turned = names[number % 3 :] + names[: number % 3]
                rounds.append({name: workers[name].ask(**job)["median_us"] for name in turned})
            step_us = statistics.median(one["none"] for one in rounds)
            found[f"width {width}"] = row = {"step_us": round(step_us, 1)}
            for name in ("agent", "control"):
                mean, low, high = interval([one[name] - one["none"] for one in rounds])
                row[name] = [round(value, 2) for value in (mean, low, high)]
                percent = ", ".join(f"{value / step_us:+.2%}" for value in (low, high))
                print(
                    f"step of {step_us:8.0f} us: {name:7} {mean:+7.1f} us per step, "
                    f"95 % interval [{low:+.1f}, {high:+.1f}] us = [{percent}]"
                )
    finally:
        for worker in workers.values():
            worker.close()
        shutil.rmtree(base, ignore_errors=True)
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """What is not as promised, in words; empty if all is."""
    texts = [
        f"{state}: Lightning's own save takes only {one['ratio']:g} times as long, promised {PROMISE:g}"
        for state, one in found["blocking"].items()
        if one["ratio"] < PROMISE
    ]
    if found["hooks"]["part"] > PROMISE_HOOKS:
        texts.append(f"hooks: {found['hooks']['part']:g} times an empty callback's time, promised {PROMISE_HOOKS:g}")
    for state, one in found["overhead"].items():
        # Two processes without the agent differ too: only what is surely more than that can be told from noise.
        noise = max(abs(value) for value in one["control"][1:])
        if one["agent"][1] > noise:
            texts.append(f"{state}: at least {one['agent'][1]:+g} us per step, where noise is up to {noise:g} us")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--states", default="llm,small")
    parser.add_argument("--package", choices=sorted(OVERLAYS), default="lightning.pytorch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.path.insert(0, str(ROOT))
        work(args.worker)
        return 0
    found = {
        "blocking": blocking(args.package, args.states.split(","), args.rounds),
        "hooks": hooks(args.package, args.pairs),
        "overhead": overhead(args.package, args.pairs),
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    texts = missed(found)
    for text in texts:
        print(f"missed: {text}", file=sys.stderr)
    if not texts:
        print("all promises are kept; a step with no save due can't be told from noise")
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
