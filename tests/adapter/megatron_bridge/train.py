"""The user's training script of these tests: knows nothing of mlflashpoint, and notes what it sees of its state."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any


def _digest(*parts: Any) -> str:
    import numpy
    import torch

    total = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, numpy.ndarray):
            total.update(value.tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(str(key).encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        else:
            total.update(repr(value).encode())

    walk(parts)
    return total.hexdigest()[:20]


def _optimizer_state(optimizer: Any) -> list[Any]:
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", part)
        for group in inner.param_groups:
            found.append({key: value for key, value in group.items() if key != "params" and not callable(value)})
            found += [[param, inner.state.get(param, {})] for param in group["params"]]
    return found


def _rng() -> dict[str, str]:
    import numpy
    import torch
    from megatron.core import tensor_parallel

    return {
        "python": _digest(random.getstate()),
        "numpy": _digest(numpy.random.get_state()),
        "torch": _digest(torch.get_rng_state()),
        "tracker": _digest(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _before_data(record: Any) -> None:
    """Note the generators between the load and the data: a data loader that is made draws a seed from torch's."""
    import megatron.bridge.training.setup as setup

    original = setup.setup_data_iterators

    def noted(*args: Any, **kwargs: Any) -> Any:
        record("loaded", rng=_rng())
        return original(*args, **kwargs)

    setup.setup_data_iterators = noted


def _draw() -> None:
    """Use every random generator, so that each step leaves another state of it behind."""
    import numpy
    import torch
    from megatron.core import tensor_parallel

    random.random()
    numpy.random.rand()
    torch.rand(1)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(1)


def digests(context: Any) -> dict[str, Any]:
    """Step, counters and digests of all that training goes on from."""
    state = context.state.train_state
    weights = [
        dict(chunk.named_parameters())
        for chunk in (context.model if isinstance(context.model, list) else [context.model])
    ]
    return {
        "step": int(state.step),
        "samples": int(state.consumed_train_samples),
        "flops": float(state.floating_point_operations_so_far),
        "weights": _digest(weights),
        "optimizer": _digest(_optimizer_state(context.optimizer)),
        "scheduler": _digest(context.scheduler.state_dict()),
        "rng": _rng(),
    }


def main(request: dict[str, Any]) -> None:
    """Train as ``request["options"]`` say; writes one JSON line per event to ``request["record"]`` + rank.

    Other keys: ``hold_at``, a step after which to stand still until killed; ``pause_at``, one after which to stand
    still until the test lets the run go on; ``plugin``, ``"module:function"`` that is called with the config first.
    """
    import importlib

    from bridge_on_cpu.recipe import Options, configuration
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    record = open(f"{request['record']}{os.environ['RANK']}", "a", buffering=1)  # noqa: SIM115

    def write(event: str, **fields: Any) -> None:
        record.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")

    class Recorder(Callback):
        def on_train_start(self, context: Any) -> None:
            write("start", **digests(context))

        def on_train_step_end(self, context: Any) -> None:
            _draw()
            # The loop counts the step only after this.
            write("trained", after=int(context.state.train_state.step) + 1, loss=_loss(context))

        def on_train_step_start(self, context: Any) -> None:
            seen = digests(context)
            write("step", **seen)
            if seen["step"] == request.get("pause_at"):
                write("pausing", step=seen["step"])
                give_up = time.monotonic() + float(request["deadline_s"])
                while not Path(f"{request['record']}go").exists() and time.monotonic() < give_up:
                    time.sleep(0.02)
            if seen["step"] == request.get("hold_at"):
                write("holding", step=seen["step"])
                time.sleep(float(request["deadline_s"]))
                sys.exit("nobody has killed this run")

        def on_train_end(self, context: Any) -> None:
            write("end", **digests(context))

    _before_data(write)
    config = configuration(Options(**request["options"]))
    if request.get("plugin"):
        module, _, name = request["plugin"].partition(":")
        getattr(importlib.import_module(module), name)(config)
    pretrain(config, forward_step, callbacks=[Recorder()])
    write("done")


def _loss(context: Any) -> str:
    losses = getattr(context, "loss_dict", None) or {}
    return json.dumps({key: float(value).hex() for key, value in losses.items()}, sort_keys=True)


if __name__ == "__main__":
    import bridge_on_cpu

    bridge_on_cpu.prepare()
    import torch

    torch.set_num_threads(1)
    bridge_on_cpu.settle()
    main(json.loads(Path(sys.argv[1]).read_text()))
