"""A user's training script: pretrains a GPT with Megatron Bridge, and has never heard of mlflashpoint.

It notes in a file what its state is after each step, which is how the demo sees that nothing got lost.
Usage: train.py SAVE_FOLDER RECORD STEPS DURABLE_INTERVAL
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(save: str, record: str, steps: int, durable_interval: int) -> None:
    from bridge_on_cpu.digests import digests
    from bridge_on_cpu.recipe import Options, configuration
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    out = open(f"{record}.{os.environ['RANK']}", "a", buffering=1)  # noqa: SIM115

    def note(event: str, context: Any) -> None:
        out.write(json.dumps({"event": event, "pid": os.getpid(), **digests(context)}) + "\n")

    class Notes(Callback):
        def on_train_start(self, context: Any) -> None:
            note("start", context)

        def on_train_step_start(self, context: Any) -> None:
            note("step", context)

        def on_train_end(self, context: Any) -> None:
            note("end", context)

    options = Options(
        steps=steps,
        save=save,
        load=save,
        checkpoint={"save_interval": durable_interval},
        hidden=512,
        layers=8,
        vocabulary=4096,
        sequence=32,
        samples_per_step=2,
        # The framework's own timer lines are log records.
        verbose=bool(os.environ.get("DEMO_VERBOSE")),
    )
    pretrain(configuration(options), forward_step, callbacks=[Notes()])


if __name__ == "__main__":
    import bridge_on_cpu

    bridge_on_cpu.prepare()
    import torch

    torch.set_num_threads(1)
    bridge_on_cpu.settle()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
