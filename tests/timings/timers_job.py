"""Two real ranks with the real ``megatron.core.timers.Timers`` on gloo, started by torchrun.

``TIMERS_OPTION`` is the log option, ``STALL_MS`` the length of a save; rank 1 takes 20 ms longer.
"""

import logging
import os
import sys
import time

import torch
import torch.distributed as dist

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
# the timers time a CUDA device; on a CPU there is nothing to wait for
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None

from megatron.core.timers import Timers  # noqa: E402

dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
options = os.environ["TIMERS_OPTIONS"].split(",")
for number, option in enumerate(options):
    timers = Timers(0, option)
    # no step comes twice: its times, if they happened to be equal, would be taken for one save
    for step in range(3 * number + 1, 3 * number + 4):
        if rank == last:
            print(f" iteration {step:8d}/{3 * len(options):8d} | consumed samples: {step:12d} |", flush=True)
        timers("save-checkpoint", log_level=0).start(barrier=True)
        time.sleep((float(os.environ["STALL_MS"]) + 20 * rank) / 1e3)
        timers("save-checkpoint").stop(barrier=False)
        timers.log(["save-checkpoint"])
dist.destroy_process_group()
