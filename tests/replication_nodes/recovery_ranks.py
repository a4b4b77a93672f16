"""One rank of the job of test_recovery.py: three nodes, one of which loses its memory again and again.

Usage: recovery_ranks.py save|again DURABLE

It is always rank 1 that has to fetch. What each rank finds, and how long that takes, is in its report.
"""

import functools
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapter" / "pytorch"))

import torch
import torch.distributed as dist
from launch import report, scenarios

from mlflashpoint.core.arena import scan_seat
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.core.slotfiles import remove_files
from mlflashpoint.errors import FlashpointError
from mlflashpoint.replication import gloo_server, replicator

#: a shard of 2 MB
NUMBERS = 500_000
#: two sources give it in 1.6 s
SLOW = "5mbit"
#: and at this rate not at all
STALLED = "16kbit"
DEADLINE_S = 6
BASE = Path(os.environ["MLFLASHPOINT_BASE_CONTAINER"])

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
# Small parts, so that each source has some.
replicator.gather = functools.partial(replicator.gather, range_bytes=NUMBERS // 2)
hand_out = gloo_server._hand_out
results = {}
scenario = scenarios(results)


def state(step):
    return {"w": torch.arange(NUMBERS, dtype=torch.float32) + step * 100 + rank}


def link(rate):
    """What leaves this node for others goes at that rate; None for as fast as it can."""
    if rate is None:
        # There may be none.
        subprocess.run(["tc", "qdisc", "del", "dev", "eth1", "root"], capture_output=True)
    else:
        subprocess.run(f"tc qdisc replace dev eth1 root tbf rate {rate} burst 64kbit latency 300ms".split(), check=True)


def lose(*steps):
    """Rank 1's node loses what it holds of these steps, or all."""
    if rank == 1 and not steps:
        shutil.rmtree(BASE)
    elif rank == 1:
        slots = [slot for seat in BASE.glob("*/seat-*") for slot in scan_seat(seat)]
        for slot in slots:
            if slot.record is not None and slot.record.step in steps:
                remove_files(slot.path)


def find(**rates):
    """A start of the job, over links of these rates."""
    link(rates.get(f"of_{rank}"))
    dist.barrier()
    runtime = Runtime.from_env(replicas=2, deadline_s=DEADLINE_S)
    began, error, step, same = time.monotonic(), "", -1, False
    try:
        recovery = runtime.find_latest()
        took = time.monotonic() - began
        if recovery is not None:
            step, same = recovery.step, torch.equal(runtime.load(recovery).state["w"], state(recovery.step)["w"])
    except FlashpointError as raised:
        took, error = time.monotonic() - began, f"{type(raised).__name__}: {raised}"
    link(None)
    return runtime, {"step": step, "same": same, "error": error, "took": took}


def found(**rates):
    """The same, and what was lost is made up for."""
    runtime, seen = find(**rates)
    dist.barrier()
    runtime.close()
    return seen


def until(met):
    give_up = time.monotonic() + 30
    while not met() and time.monotonic() < give_up:
        time.sleep(0.01)


def hand_out_when_both_are_asked(*arguments):
    asked = Path(os.environ["REPORTS"], "waiting-2")
    if rank == 2:
        # Its node is killed for that.
        asked.touch()
        time.sleep(60)
    until(asked.exists)
    hand_out(*arguments)


if sys.argv[1] == "save":

    @scenario
    def saved():
        runtime = Runtime.from_env(replicas=2)
        runtime.find_latest()
        for step in (1, 2):
            assert runtime.save(state(step), step=step, wait=True).ok
        assert runtime.flush()
        until(lambda: runtime.stats()["last_complete_step"] == 2)
        dist.barrier()
        runtime.close()
        return runtime.stats()["last_complete_step"]

    @scenario
    def stalled_links_and_the_version_before_at_hand():
        lose(2)
        return found(of_0=STALLED, of_2=STALLED)

    @scenario
    def slow_links():
        lose()
        return found(of_0=SLOW, of_2=SLOW)

    @scenario
    def one_stalled_link():
        lose()
        return found(of_2=STALLED)

    @scenario
    def stalled_links_and_nothing_at_hand():
        lose()
        return found(of_0=STALLED, of_2=STALLED)

    gloo_server._hand_out = hand_out_when_both_are_asked
    lose()
    report({**results, "a_killed_source": find()[1]})
else:

    @scenario
    def again():
        return found()


# Whoever has lost a peer would wait for it.
os._exit(0)
