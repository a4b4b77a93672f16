"""A process that goes on from what it finds, saves two steps, gets a SIGTERM and waits.

How its own handler for SIGTERM behaves, how the drain directory does, and the budget are given. Forked from a warm
process (tests/warm.py), which imports this module for what that imports.
"""

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from mlflashpoint.core import draindir
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import state


class Slow:
    """A file of which each write takes long."""

    def __init__(self, *arguments, **keywords):
        self.stream = open(*arguments, **keywords)  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def fileno(self):
        return self.stream.fileno()

    def write(self, part):
        time.sleep(0.02)
        return self.stream.write(part[:20])


def main(base, drain, handler, disk, budget_s):
    seen = []

    def flag(number, frame):
        seen.append(number)

    def leave(number, frame):
        raise SystemExit(7)

    def compose():
        # as Lightning does it: the handler that was there, and its own
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (before(number, frame), flag(number, frame)))

    if disk == "slow":
        draindir.open = Slow
    if disk == "hung":
        draindir._sync_data = lambda descriptor: time.sleep(600)
    handlers = {"flag": flag, "leave": leave}
    if handler in handlers:
        signal.signal(signal.SIGTERM, handlers[handler])
    config = StoreConfig(job_id="job", base_container=base, drain_dir=drain, drain_budget_s=float(budget_s))
    runtime = Runtime(config, rank=0, world_size=1, local_rank=0)
    recovery = runtime.find_latest()
    found = 0 if recovery is None else runtime.load(recovery).step
    if handler == "late":
        signal.signal(signal.SIGTERM, flag)
    if handler == "composed":
        compose()
    for step in (found + 1, found + 2):
        assert runtime.save(state(step, 0), step=step, wait=True).ok
    if handler == "composed_last":
        compose()
    if handler == "stuck":
        threading.Thread(target=terminate_and_kill, args=(Path(drain), found + 2), daemon=True).start()
        store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)
        store.get("what nobody will ever set")
    threading.Timer(0.1, terminate).start()
    if handler == "back":
        store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=6), wait_for_workers=False)
        with contextlib.suppress(dist.DistError):
            store.get("what nobody will ever set")
    give_up = time.monotonic() + 30
    while not seen and time.monotonic() < give_up:
        time.sleep(0.01)
    print("seen", seen, flush=True)


def terminate():
    print("terminated at", time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_and_kill(drain, step):
    """A SIGTERM when the main thread has gone into native code, and the end of the process once it is drained."""
    time.sleep(1)
    terminate()
    give_up = time.monotonic() + 30
    while not list(drain.rglob(f"step-{step}.*/rank-0.commit")) and time.monotonic() < give_up:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
