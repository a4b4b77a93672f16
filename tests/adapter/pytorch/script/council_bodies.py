"""What the ranks do in the tests of what they say to each other: real processes, in a store that outlives them."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from mlflashpoint.adapter.pytorch.script import council
from mlflashpoint.adapter.pytorch.script.process_group import connected_group
from mlflashpoint.adapter.pytorch.script.stream import Stream
from mlflashpoint.adapter.pytorch.script.streams import stream_of
from mlflashpoint.core import connection
from mlflashpoint.errors import DeadlineExceededError

GROUP = "dcp-0123456789ab"


def begin(me, store=None):
    """A default process group that leaves nothing in the store, for gloo's own trips over dead ranks' addresses."""
    os.environ |= {
        "MLFLASHPOINT_JOB_ID": "council",
        "MLFLASHPOINT_BASE_CONTAINER": str(me.base),
        "MLFLASHPOINT_DEADLINE_S": str(me.settings["deadline_s"]),
        "MLFLASHPOINT_REPLICAS": "0",
        "LOCAL_RANK": str(me.local_rank),
    }
    store = dist.PrefixStore("default_pg", store or me.store)
    dist.init_process_group("fake", store=store, rank=me.rank, world_size=me.world)


def rounds(me, answers, *, dies=False, late_s=0.0):
    """One round for each answer; with ``dies`` rank 1 is killed before the last one."""
    begin(me)
    found = []
    for number, answer in enumerate(answers):
        if me.rank == 1:
            time.sleep(late_s)
            if dies and number == len(answers) - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        found.append(council.hold(lambda answer=answer: answer))
    return [(outcome.ok, outcome.answer) for outcome in found]


def waits(me, late):
    """A first round that one rank begins when the other has given up, and a second one: how each ends, and after what.

    The other rank waits two seconds for the first one, all else has the deadline.
    """
    begin(me)
    found = []
    for number in range(2):
        first = number == 0
        if first and me.rank == late:
            me.store.wait(["gave up"])
        started = time.monotonic()
        ok = council.agreed(True, 2.0 if first and me.rank != late else None)
        found.append((ok, time.monotonic() - started))
        if first and me.rank != late:
            me.store.set("gave up", "1")
        # The script's own save, which all ranks leave together.
        me.store.add(f"left-{number}", 1)
        while me.store.add(f"left-{number}", 0) < me.world:
            time.sleep(0.02)
    return found


def stream_sums(me, *, late_s=0.0):
    """Open a stream, which rank 1 connects later; the sum over its process group."""
    begin(me)
    if me.rank == 1:
        connect = Stream.connect

        def later(self, *args):
            time.sleep(late_s)
            connect(self, *args)

        Stream.connect = later
    stream = stream_of(GROUP, Path("step-1"), False)
    if stream is None:
        return None
    total = torch.tensor([me.rank + 1])
    dist.all_reduce(total, group=stream._process_group)
    return int(total)


def connections(me):
    """How many connections the calls of a script have made."""
    made = []
    clone = connection.apart

    def counted(store):
        made.append(store)
        return clone(store)

    connection.apart = counted
    begin(me)
    for family in ("dcp-0123456789ab", "dcp-0123456789cd"):
        assert council.agreed(True)
        stream = stream_of(family, Path("step-1"), False)
        stream.store.latest()
    return len(made)


def unconnected(me):
    """Rank 0 alone connects a group; what that raises, and after how long."""
    begin(me)
    started = time.monotonic()
    try:
        if me.rank == 0:
            connected_group("nobody-else", connect_s=1.0, timeout_s=20.0)
    except DeadlineExceededError as error:
        return str(error), time.monotonic() - started
    return None


def host_gone(me, signal_number):
    """Rank 0 hosts the store, and gets the signal after a round; the seconds that rank 1 then waits in its rounds."""
    if me.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        me.store.set("host", f"{server.port} {os.getpid()}")
    port, pid = map(int, me.store.get("host").split())
    begin(me, server if me.rank == 0 else dist.TCPStore("127.0.0.1", port, None, False))
    assert council.agreed(True)
    if me.rank == 0:
        # Until the signal, or until rank 1 is done.
        me.store.wait(["done"])
        return None
    os.kill(pid, signal_number)
    waits = []
    for _ in range(2):
        started = time.monotonic()
        assert council.hold().rank == -1
        waits.append(time.monotonic() - started)
    assert council.given_up()
    if signal_number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    me.store.set("done", "1")
    return waits
