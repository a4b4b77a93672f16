"""Speed of replication over loopback, each figure against a yardstick measured in the same run.

    python benchmarks/replication.py [--mib 1024] [--rounds 7] [--training-mib 128] [--json FILE]

Two processes on this machine, memory in tmpfs that was faulted in beforehand, methods interleaved round by round.
Prints the median of each and the ratios that the project promises. Throughput is in GB/s of 1e9 bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mlflashpoint.core.copying import in_two_threads
from mlflashpoint.errors import ShardCorruptError
from mlflashpoint.replication.delivery import OutgoingShard
from mlflashpoint.replication.gather import Source
from mlflashpoint.replication.gloo import GlooTransport
from mlflashpoint.replication.replicator import Replicator
from mlflashpoint.replication.transport import Identity

TIMEOUT_S = 120.0
#: tensors in a shard
PARTS = 64


def tmpfs(nbytes: int) -> memoryview:
    """Memory of a fresh tmpfs file that goes with the process, every page touched."""
    path = f"/dev/shm/mlflashpoint-benchmark-{os.getpid()}-{uuid.uuid4().hex}"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.posix_fallocate(handle, 0, nbytes)
    mapping = mmap.mmap(handle, nbytes)
    os.close(handle)
    view = memoryview(mapping)
    torch.frombuffer(view, dtype=torch.uint8).fill_(1)
    return view


def digests_of(view: memoryview) -> bytes:
    """One per tensor, as a shard's index has them."""
    return b" ".join(xxhash.xxh3_128_hexdigest(view[part]).encode() for part in parts_of(len(view)))


def parts_of(nbytes: int) -> list[slice]:
    step = -(-nbytes // PARTS)
    return [slice(start, start + step) for start in range(0, nbytes, step)]


def check(header: bytes, buffers: list[memoryview]) -> None:
    """As the core checks a shard: tensor by tensor, with two threads."""
    view, bad = buffers[0], []

    def one(part: slice, digest: bytes) -> None:
        if xxhash.xxh3_128_hexdigest(view[part]).encode() != digest:
            bad.append(part)

    parts, digests = parts_of(len(view)), header.split(b" ")
    in_two_threads([functools.partial(one, *pair) for pair in zip(parts, digests, strict=True)], len(view))
    if bad:
        raise ShardCorruptError("digest differs")


class Sink:
    def __init__(self, room: memoryview) -> None:
        self.room = room

    def allocate(self, source: int, header: bytes, sizes: tuple[int, ...]) -> list[memoryview]:
        return [self.room[: sizes[0]]]

    def commit(self, source: int, header: bytes, buffers: list[memoryview]) -> None:
        check(header, buffers)

    def abandon(self, source: int, header: bytes, error: Exception) -> None:
        pass


class Side:
    """One of the two processes: rank 0 measures, rank 1 obeys."""

    def __init__(self, rank: int, store: dist.Store, nbytes: int, part: int) -> None:
        self.rank, self.store, self.nbytes, self.part = rank, store, nbytes, part
        self.memory = tmpfs(nbytes)
        if rank == 0:
            torch.frombuffer(self.memory, dtype=torch.uint8).random_()
        self.replica = tmpfs(nbytes)
        transport = GlooTransport(dist.PrefixStore("replication", store), Identity("bench", "default", 1, rank))
        self.replicator = Replicator(transport, holders=[1 - rank], sink=Sink(self.replica), timeout_s=TIMEOUT_S)
        self.transport = transport
        self.sockets = self._connect_sockets()
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("plain", store), rank, 2, timedelta(seconds=TIMEOUT_S))

    def _connect_sockets(self) -> list[socket.socket]:
        if self.rank == 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.store.set("raw-port", str(server.getsockname()[1]))
                return [server.accept()[0] for _ in range(2)]
        port = int(self.store.get("raw-port"))
        return [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]

    def command(self, name: str) -> None:
        """Have the other side run a method at the same time."""
        self.sockets[0].sendall(bytes([COMMANDS.index(name)]))
        self.sockets[0].recv(1)

    def raw(self) -> None:
        """A plain loop over two sockets from warm memory into warm memory, and one byte back when all has arrived."""
        self._raw(self.nbytes)

    def raw_part(self) -> None:
        """The same for as many bytes as the training loop replicates."""
        self._raw(self.part)

    def _raw(self, nbytes: int) -> None:
        half = nbytes // 2

        def move(lane: int) -> None:
            connection = self.sockets[lane]
            if self.rank == 0:
                connection.sendall(self.memory[lane * half : (lane + 1) * half])
                connection.recv(1)
                return
            view, got = self.replica[lane * half : (lane + 1) * half], 0
            while got < half:
                got += connection.recv_into(view[got:], min(4 << 20, half - got))
            connection.sendall(b"k")

        threads = [threading.Thread(target=move, args=(lane,)) for lane in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def gloo_fresh(self) -> None:
        """One gloo send, received into memory that nobody has touched before."""
        done = torch.zeros(1, dtype=torch.uint8)
        if self.rank == 0:
            self.gloo.send([torch.frombuffer(self.memory, dtype=torch.uint8)], 1, 1).wait()
            self.gloo.recv([done], 1, 2).wait()
        else:
            self.gloo.recv([torch.empty(self.nbytes, dtype=torch.uint8)], 0, 1).wait()
            self.gloo.send([done], 0, 2).wait()

    def replicate(self) -> None:
        """A shard by the replicator: sent, its digest checked at the receiver, acknowledged."""
        if self.rank == 0:
            delivery = self.replicator.submit(OutgoingShard(self.header, [self.memory]))
            if not (delivery.wait(TIMEOUT_S) and delivery.ok):
                raise RuntimeError(f"replication failed: {dict(delivery.errors)}")

    def transfer(self) -> None:
        """The pure transfer of a fetch: a plain loop over the two sockets the other way."""
        half = self.nbytes // 2

        def move(lane: int) -> None:
            connection = self.sockets[lane]
            if self.rank == 1:
                connection.sendall(self.replica[lane * half : (lane + 1) * half])
                return
            view, got = self.memory[lane * half : (lane + 1) * half], 0
            while got < half:
                got += connection.recv_into(view[got:], min(4 << 20, half - got))

        threads = [threading.Thread(target=move, args=(lane,)) for lane in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def fetch(self) -> None:
        """A lost shard from its replica: pulled by the transport alone, without a check."""
        if self.rank == 0:
            self.transport.fetch(1, "replica", [self.memory], offset=0, length=self.nbytes, timeout_s=TIMEOUT_S)

    def recover(self) -> None:
        """A lost shard from its replica: found, pulled and its digest checked."""
        if self.rank == 0:
            self.replicator.fetch(
                [Source(1, "replica")], allocate=lambda *_: [self.memory], verify=check, timeout_s=TIMEOUT_S
            )


METHODS = ("raw", "gloo_fresh", "replicate", "transfer", "fetch", "recover")
COMMANDS = (*METHODS, "raw_part")
#: method, what its time is a multiple of, and the most that it may be: half the raw loop's speed, 1.4 times gloo's
PROMISES = (("replicate", "raw", 1 / 0.5), ("replicate", "gloo_fresh", 1 / 1.4), ("recover", "fetch", 1.5))


def follow(port: int, nbytes: int, part: int) -> None:
    """Rank 1: runs what rank 0 asks for."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    side = Side(1, store, nbytes, part)
    connection = side.sockets[0]
    while True:
        method = connection.recv(1)
        if not method:
            break
        name = COMMANDS[method[0]]
        if name == "fetch":
            header = digests_of(side.replica)
            side.transport.offer("replica", header, [side.replica], timeout_s=TIMEOUT_S)
        connection.sendall(b"r")
        getattr(side, name)()
    side.replicator.close(timeout_s=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--training-mib", type=int, default=128, help="size of the shard in the training loop")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--follow", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.follow:
        follow(*options.follow)
        return 0
    nbytes = options.mib << 20
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    sizes = [str(nbytes), str(options.training_mib << 20)]
    follower = subprocess.Popen([sys.executable, __file__, "--follow", str(store.port), *sizes])
    try:
        side = Side(0, store, nbytes, options.training_mib << 20)
        side.header = digests_of(side.memory)
        seconds = measure(side, options.rounds)
        steps = train(side, options.rounds)
        side.sockets[0].close()
        side.replicator.close(timeout_s=5)
    finally:
        follower.terminate()
        follower.wait(20)
    return report(seconds, steps, nbytes, options)


def train(side: Side, rounds: int) -> dict[str, list[float]]:
    """Steps of a training loop on one core, in blocks of ten: alone, with a shard replicated every five steps, and with
    the same bytes sent every five steps by plain sockets in a thread, which is what it costs at least.

    Both ends of the transfer run on this machine; so do both directions on a node of a real job.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(256, 1024)
    part = side.memory[: side.part]
    shard = OutgoingShard(digests_of(part), [part])
    steps: dict[str, list[float]] = {"none": [], "replicated": [], "sockets": []}
    for turn in range(rounds + 1):
        for kind, seconds in steps.items():
            sending = None
            for step in range(10):
                start = time.perf_counter()
                if kind == "replicated" and step % 5 == 0:
                    side.replicator.wait_idle(TIMEOUT_S)
                    side.replicator.submit(shard)
                if kind == "sockets" and step % 5 == 0:
                    if sending is not None:
                        sending.join()
                    side.command("raw_part")
                    sending = threading.Thread(target=side.raw_part)
                    sending.start()
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if turn:
                    seconds.append(time.perf_counter() - start)
            side.replicator.wait_idle(TIMEOUT_S)
            if sending is not None:
                sending.join()
    return steps


def measure(side: Side, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(rounds + 1):
        for name in METHODS:
            side.command(name)
            start = time.perf_counter()
            getattr(side, name)()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(
    seconds: dict[str, list[float]], steps: dict[str, list[float]], nbytes: int, options: argparse.Namespace
) -> int:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        "replication / raw two-connection loop (speed, at least 0.5)": median["raw"] / median["replicate"],
        "replication / one gloo send through fresh memory (speed, at least 1.4)": median["gloo_fresh"]
        / median["replicate"],
        "recovery of a lost shard / pure transfer by the transport (time, at most 1.5)": median["recover"]
        / median["fetch"],
        "recovery of a lost shard / raw two-connection loop (time)": median["recover"] / median["transfer"],
        f"training step with {options.training_mib} MiB replicated every 5 steps / without (mean time)": (
            statistics.mean(steps["replicated"]) / statistics.mean(steps["none"])
        ),
        f"training step with {options.training_mib} MiB sent by plain sockets every 5 steps / without (mean time)": (
            statistics.mean(steps["sockets"]) / statistics.mean(steps["none"])
        ),
    }
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {nbytes >> 20} MiB, {options.rounds} rounds")
    for name in METHODS:
        print(f"{name:12} {nbytes / median[name] / 1e9:6.2f} GB/s  {median[name] * 1e3:8.1f} ms")
    for name, ratio in ratios.items():
        print(f"{ratio:6.2f}  {name}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "steps": steps, "ratios": ratios}, indent=2))
    missed = [
        f"{method} / {of} is {median[method] / median[of]:.2f}, may be {most:g}"
        for method, of, most in PROMISES
        if median[method] / median[of] > most
    ]
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
