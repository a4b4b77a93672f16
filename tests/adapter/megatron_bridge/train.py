"""The user's training script of these tests: knows nothing of mlflashpoint, and notes what it sees of its state."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any


def _before_data(record: Any) -> None:
    """Note the generators between the load and the data: a data loader that is made draws a seed from torch's."""
    import megatron.bridge.training.setup as setup
    from bridge_on_cpu.digests import rng_state

    original = setup.setup_data_iterators

    def noted(*args: Any, **kwargs: Any) -> Any:
        record("loaded", rng=rng_state())
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


def main(request: dict[str, Any]) -> None:
    """Train as ``request["options"]`` say; writes one JSON line per event to ``request["record"]`` + rank.

    Other keys: ``hold_at``, a step after which to stand still until killed; ``pause_at``, one after which to stand
    still until the test lets the run go on; ``plugin``, ``"module:function"`` that is called with the config first;
    ``probe``, ``"module:function"`` that is called instead of training, its result recorded.
    """
    import importlib

    from bridge_on_cpu.digests import digests
    from bridge_on_cpu.recipe import Options, configuration
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    record = open(f"{request['record']}{os.environ['RANK']}", "a", buffering=1)  # noqa: SIM115

    def write(event: str, **fields: Any) -> None:
        record.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")

    if request.get("probe"):
        module, _, name = request["probe"].partition(":")
        write("probe", result=getattr(importlib.import_module(module), name)(request))
        return

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
