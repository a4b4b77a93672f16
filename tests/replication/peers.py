"""Real peer processes for the replication tests: each is one rank that obeys commands and answers each."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
import xxhash

from mlflashpoint.replication.transport import Identity
from tests.core.ranks import forkserver

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0


def pattern(seed: int, size: int) -> bytes:
    """``size`` bytes that differ from place to place and from seed to seed."""
    block = random.Random(seed).randbytes(1 << 20)
    return (block * (size // len(block) + 1))[:size] if size else b""


def xxh(*parts) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def find_mooncake() -> str:
    """Make the engine of tools/envs/mooncake.sh importable; returns why there is none, or nothing."""
    overlay = ROOT / ".envs" / "mooncake"
    if str(overlay) not in sys.path:
        sys.path.append(str(overlay))
    try:
        for library in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
            if (overlay / "lib" / library).exists():
                ctypes.CDLL(str(overlay / "lib" / library), mode=ctypes.RTLD_GLOBAL)
        import mooncake.engine  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def make_transport(kind: str, store, identity, **options):
    if kind == "gloo":
        from mlflashpoint.replication.gloo import GlooTransport

        return GlooTransport(store, identity, **options)
    find_mooncake()
    from mlflashpoint.replication.mooncake import MooncakeTransport

    return MooncakeTransport(store, identity, **options)


class Peer:
    """A rank in a process of its own.

    Args:
        script: an interpreter of its own, which ends as that of a script does; else the process is forked, fast.
    """

    def __init__(self, kind: str, port: int, rank: int, *, script: bool = False, **identity):
        self.rank = rank
        context = multiprocessing.get_context("spawn") if script else forkserver
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, port, rank, identity, theirs))
        self.process.start()
        theirs.close()
        self._answers: queue.Queue = queue.Queue()
        self._awaited = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while True:
                self._answers.put(self._pipe.recv())
        except (EOFError, OSError):
            self._answers.put({"error": "Gone", "text": "the process ended"})

    def start(self, do: str, **arguments):
        self._awaited += 1
        self._pipe.send((do, arguments))
        return self

    def answer(self, timeout_s: float = ANSWER_S):
        answer = self._answers.get(timeout=timeout_s)
        self._awaited -= 1
        return answer

    @property
    def idle(self) -> bool:
        """Whether it lives, and has answered all that it was asked."""
        return self.process.is_alive() and not self._awaited

    def ask(self, do: str, **arguments):
        return self.start(do, **arguments).answer()

    def signal(self, number: int):
        os.kill(self.process.pid, number)

    def stop(self):
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join(30)


class _Rank:
    """Obeys the commands; every method answers with plain data."""

    def __init__(self, transport):
        self.transport = transport
        self.buffers: list[bytearray] = []

    def ready(self):
        return {}

    def take(self, decision="acknowledge", timeout_s=20.0, fail_at=None):
        incoming = self.transport.receive(timeout_s=timeout_s)
        if incoming is None:
            return {"none": True}
        if decision == "refuse at once":
            incoming.refuse(ValueError("no room"), timeout_s=timeout_s)
            return {"source": incoming.source}
        self.buffers = [bytearray(b"\xee" * size) for size in incoming.sizes]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        incoming.accept([memoryview(buffer) for buffer in self.buffers], timeout_s=timeout_s)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if decision == "refuse":
            incoming.refuse(ValueError("digest differs"), timeout_s=timeout_s)
        else:
            incoming.acknowledge(timeout_s=timeout_s)
        return {
            "source": incoming.source,
            "header": incoming.header.hex(),
            "sizes": list(incoming.sizes),
            "digest": xxh(*self.buffers),
            "grown_kib": grown,
        }

    def take_one_that_comes(self):
        """Go on taking, as a replicator does, until a shard has come whole."""
        from mlflashpoint.errors import FlashpointError

        for _ in range(5):
            try:
                return self.take()
            except FlashpointError:
                continue
        return {"error": "none came"}

    def send(self, peer, seed, sizes, timeout_s=20.0, signal_self=None):
        signals = [signal_self] if signal_self else []

        def progress(_):
            if signals:
                os.kill(os.getpid(), signals.pop())

        buffers = [memoryview(pattern(seed + i, size)) for i, size in enumerate(sizes)]
        self.transport.send(peer, b"from a process", buffers, timeout_s=timeout_s, progress=progress)
        return {}

    def offer(self, key, seed, sizes):
        buffers = [memoryview(pattern(seed + i, size)) for i, size in enumerate(sizes)]
        self.transport.offer(key, b"offered", buffers, timeout_s=10)
        return {}

    def offer_shard(self, key, seed, size):
        from tests.replication.sinks import shard

        given = shard(pattern(seed, size))
        self.transport.offer(key, given.header, given.buffers, timeout_s=10)
        return {}

    def cross(self, peer, size, rounds):
        """Send and take at the same time."""
        taken: list = []
        taker = threading.Thread(target=lambda: taken.extend(self.take()["digest"] for _ in range(rounds)))
        taker.start()
        for turn in range(rounds):
            self.send(peer, turn, [size])
        taker.join(60)
        return {"taken": taken}

    def replicate(self, holders, timeout_s=20.0, room=1 << 40):
        """Hand the transport to a replicator whose replicas lie in plain memory."""
        from mlflashpoint.replication.replicator import Replicator
        from tests.replication.sinks import MemorySink

        self.sink = MemorySink(room)
        self.replicator = Replicator(self.transport, holders=holders, sink=self.sink, timeout_s=timeout_s)
        return {}

    def replicas(self):
        return {str(rank): [header.decode(), xxh(data)] for rank, (header, data) in self.sink.replicas.items()}

    def threads(self):
        return {"names": [thread.name for thread in threading.enumerate()]}

    def leave(self):
        """End as a script does that closes nothing."""
        raise SystemExit(0)

    def close(self):
        self.transport.close(timeout_s=10)
        return self.threads()


def _serve(kind: str, port: int, rank: int, identity: dict, pipe) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    who = Identity(**{"job_id": "job", "group": "default", "incarnation": 1, "rank": rank, **identity})
    me = _Rank(make_transport(kind, dist.PrefixStore("replication", store), who))
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = getattr(me, do)(**arguments)
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error), "at": time.time()}
        pipe.send(answer)
    me.transport.close(timeout_s=5)
