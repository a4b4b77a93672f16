"""Starts ranks as real processes that share a c10d store, lets a test kill them, and collects what they return.

The processes are forked from a server that has torch loaded already, so that a test can afford many of them. The store
is hosted by the test's own process, as torchrun's agent does.
"""

import contextlib
import datetime
import functools
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig

DEADLINE_S = 60

#: what it loads it loads once, for whoever starts processes by it
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["tests.core.ranks", "tests.core.bodies"])


@dataclass
class Rank:
    """What a body gets."""

    rank: int
    world: int
    local_rank: int
    base: Path
    port: int
    settings: dict

    def __post_init__(self):
        self.logs = []

    @functools.cached_property
    def store(self):
        # By address, and once: each connection costs a reverse look-up of names.
        return dist.TCPStore("127.0.0.1", self.port, None, False, timeout=datetime.timedelta(seconds=DEADLINE_S))

    def runtime(self, **more):
        settings = {"job_id": "job", "base_container": self.base, "deadline_s": 20, **self.settings, **more}
        group = settings.pop("group", "default")
        config = StoreConfig(**settings)
        return Runtime(
            config, rank=self.rank, world_size=self.world, local_rank=self.local_rank, store=self.store, group=group
        )

    def meet(self, name):
        """Wait for all ranks, through the store but apart from anything under test."""
        self.meet_some(name, self.world)

    def meet_some(self, name, count):
        store = self.store
        store.add(f"meet/{name}", 1)
        give_up = time.monotonic() + DEADLINE_S
        while store.add(f"meet/{name}", 0) < count:
            assert time.monotonic() < give_up, f"the other ranks did not come to {name}"
            time.sleep(0.005)


def state(step, rank, numbers=1000):
    """A state that tells its step and rank; a tensor, a scalar and a nested list."""
    return {"w": torch.full((numbers,), float(step * 100 + rank)), "step": step, "nested": [rank, {"b": torch.ones(3)}]}


class _Records(logging.Handler):
    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def _run(body, me, args, wish, pipe):
    os.setpgrp()
    torch.set_num_threads(1)
    logger = logging.getLogger("mlflashpoint")
    logger.setLevel(logging.DEBUG)
    logger.handlers = [_Records(me.logs)]
    try:
        pipe.send(("ok", body(me, *args, **wish)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise


class Life:
    """One start of a job: ``world`` ranks that all run ``body(rank, *args)``.

    Args:
        bases: base container of each rank; ranks with the same one are on one node.
        seats: local rank of each rank.
        absent: ranks that are never started.
        wish: keywords for the body.
        store: one that outlives this start, None for one of its own.
        settings: fields of StoreConfig.
    """

    def __init__(self, body, world, base, *args, bases=None, seats=None, absent=(), wish=None, store=None, **settings):
        self.store = store or dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.processes, self._pipes = {}, {}
        for rank in range(world):
            if rank in absent:
                continue
            me = Rank(
                rank, world, seats[rank] if seats else rank, bases[rank] if bases else base, self.store.port, settings
            )
            ours, theirs = forkserver.Pipe()
            self.processes[rank] = forkserver.Process(target=_run, args=(body, me, args, wish or {}, theirs))
            self._pipes[rank] = ours
            self.processes[rank].start()
            theirs.close()

    def results(self, *, killed=()):
        """What each rank returned; those in ``killed`` must have died of SIGKILL."""
        found, give_up = {}, time.monotonic() + DEADLINE_S
        try:
            for rank, process in self.processes.items():
                if rank in killed:
                    process.join(max(0, give_up - time.monotonic()))
                    assert process.exitcode == -signal.SIGKILL, f"rank {rank} ended with {process.exitcode}"
                    continue
                assert self._pipes[rank].poll(max(0, give_up - time.monotonic())), f"rank {rank} did not come back"
                kind, found[rank] = self._pipes[rank].recv()
                assert kind == "ok", f"rank {rank} failed:\n{found[rank]}"
                process.join(max(0, give_up - time.monotonic()))
                assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
        finally:
            self.kill()
        return found

    def kill(self):
        """SIGKILL whatever still runs, as a scheduler does when one rank has died."""
        for process in self.processes.values():
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join(10)


@contextlib.contextmanager
def memory_folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlf-test-") as folder:
        yield Path(folder)
