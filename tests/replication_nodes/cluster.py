"""Nodes on one machine: each has its own network, host name, process tree and tmpfs, and can be killed like one.

A node is the processes of one PID namespace. Its first process is tied to this one, and takes the rest of the node with
it when it ends, so that nothing is left however a test ends: without processes the kernel drops networks and memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.warm import Outcome, Zygote

ROOT = Path(__file__).resolve().parents[2]
SUBNETS = ("10.77.0", "10.77.1")
#: what every rank finds in its environment
SETTINGS = {
    "MLFLASHPOINT_JOB_ID": "nodes",
    "MLFLASHPOINT_BASE_CONTAINER": "/dev/shm/mlf/job",
    "MLFLASHPOINT_DEADLINE_S": "60",
    "MLFLASHPOINT_LOG_LEVEL": "DEBUG",
    "GLOO_SOCKET_IFNAME": "eth0",
}
DEADLINE_S = int(os.environ.get("TEST_DEADLINE_S", 120))
_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def why_not() -> str:
    """Why no nodes can be made here; empty if they can."""
    if os.getuid() != 0:
        return "not root"
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (apt-get install iproute2 util-linux)"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-p", "-u", "--fork", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return f"namespaces or bridges are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


def _tied() -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)


class _Space:
    """The namespaces of one node, or of the switch, held by their first process."""

    def __init__(self, name: str, memory: str) -> None:
        memory_mounted = 'mount -t tmpfs -o "size=$1,mode=1777" tmpfs /dev/shm'
        script = f'hostname "$0" && {memory_mounted} && ip link set lo up && echo up; exec sleep 3600'
        spaces = ["-n", "-m", "-p", "-u", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script, name, memory],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_tied,
        )
        assert self._holder.stdout.readline() == "up\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def command(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", "--", *argv]

    def run(self, *argv: str) -> str:
        done = subprocess.run(self.command(*argv), capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, (argv, done.stderr)
        return done.stdout

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(30)
        self._holder.stdout.close()


class Cluster:
    """``count`` nodes on two networks: ``eth0`` for the job, ``eth1`` for replication.

    Args:
        count: nodes.
        memory: size of each node's tmpfs.
    """

    def __init__(self, count: int, memory: str = "512m") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlf-nodes-"))
        self._memory = memory
        self._hosts = self.folder / "hosts"
        self._hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{SUBNETS[0]}.{n + 1} node-{n}\n" for n in range(count))
        )
        self.launches: list[Launch] = []
        self._switch = _Space("switch", "1m")
        for number in range(len(SUBNETS)):
            self._switch.run("ip", "link", "add", f"br{number}", "type", "bridge")
            self._switch.run("ip", "link", "set", f"br{number}", "up")
        self._generation = 0
        self.nodes: list[_Space | None] = [None] * count
        try:
            for number in range(count):
                self.boot(number)
        except BaseException:
            self.close()
            raise

    def boot(self, number: int, memory: str | None = None) -> None:
        """Start a node: it has nothing in its memory."""
        node = self.nodes[number] = _Space(f"node-{number}", memory or self._memory)
        node.run("mount", "--bind", str(self._hosts), "/etc/hosts")
        self._generation += 1
        for network, subnet in enumerate(SUBNETS):
            port = f"p{network}n{number}g{self._generation}"
            argv = ["ip", "link", "add", port, "netns", str(self._switch.pid)]
            subprocess.run(
                [*argv, "type", "veth", "peer", "name", f"eth{network}", "netns", str(node.pid)], check=True, timeout=30
            )
            self._switch.run("ip", "link", "set", port, "master", f"br{network}", "up")
            node.run("ip", "address", "add", f"{subnet}.{number + 1}/24", "dev", f"eth{network}")
            node.run("ip", "link", "set", f"eth{network}", "up")
        for other in self.nodes:
            if other is not None:
                # They may remember the network card of a node that had this address before.
                other.run("ip", "neighbour", "flush", "all")

    def node(self, number: int) -> _Space:
        found = self.nodes[number]
        assert found is not None
        return found

    def kill_node(self, number: int) -> None:
        """Everything on the node ends at once, and its memory is gone."""
        self.node(number).kill()
        self.nodes[number] = None

    def cut(self, number: int, network: int = 1) -> None:
        self.node(number).run("ip", "link", "set", f"eth{network}", "down")

    def mend(self, number: int, network: int = 1) -> None:
        self.node(number).run("ip", "link", "set", f"eth{network}", "up")

    def throttle(self, number: int, rate: str, network: int = 1) -> None:
        """What leaves the node on that network goes at ``rate`` from now on."""
        self.node(number).run(
            *(f"tc qdisc replace dev eth{network} root tbf rate {rate} burst 64kbit latency 300ms".split())
        )

    def unthrottle(self, number: int, network: int = 1) -> None:
        self.node(number).run("tc", "qdisc", "del", "dev", f"eth{network}", "root")

    def torchrun(self, script: Path, *arguments: object, ranks_per_node: int = 1, port: int, **environ: str) -> Launch:
        """Start the script on all nodes."""
        launch = Launch(self, script, arguments, ranks_per_node, port, environ)
        self.launches.append(launch)
        return launch

    def fork(
        self,
        warm: Zygote,
        script: Path,
        *arguments: object,
        places: Sequence[int],
        grace_s: float = 0.2,
        **environ: str,
    ) -> Outcome:
        """Run the script to its end from a warm process, rank by rank on the nodes of ``places``.

        What is left ``grace_s`` after a rank has failed is killed.
        """
        return warm.run(
            [str(argument) for argument in arguments],
            ranks=len(places),
            environ={**SETTINGS, **environ},
            deadline_s=DEADLINE_S,
            grace_s=grace_s,
            script=script,
            homes=[(self.node(place).pid, places[:rank].count(place)) for rank, place in enumerate(places)],
            master=f"{SUBNETS[0]}.{places[0] + 1}",
        )

    def close(self) -> None:
        for launch in self.launches:
            launch.kill()
        for space in (*self.nodes, self._switch):
            if space is not None:
                space.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Launch:
    """One start of a job by torchrun on all nodes."""

    def __init__(self, cluster, script, arguments, ranks_per_node, port, environ) -> None:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("MLFLASHPOINT_", "TORCHELASTIC_"))
        }
        settings = {**SETTINGS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen] = []
        self.logs: list[Path] = []
        self._cluster = cluster
        for number in range(len(cluster.nodes)):
            argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(cluster.nodes)}"]
            argv += [f"--node-rank={number}", f"--nproc-per-node={ranks_per_node}", f"--master-port={port}"]
            argv += [f"--master-addr={SUBNETS[0]}.1", f"--local-addr={SUBNETS[0]}.{number + 1}", str(script)]
            log = cluster.folder / f"log-{len(cluster.launches)}-{number}"
            self.logs.append(log)
            with open(log, "w") as stream:
                process = subprocess.Popen(
                    cluster.node(number).command(*argv, *map(str, arguments)),
                    env={**kept, **settings, **environ},
                    stdout=stream,
                    stderr=stream,
                    stdin=subprocess.DEVNULL,
                    preexec_fn=_tied,
                    cwd=ROOT,
                )
            self.processes.append(process)

    def wait(self, timeout_s: float) -> list[int | None]:
        """Exit codes of all nodes' launchers, None for one that has not ended in time."""
        give_up = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, give_up - time.monotonic()))
        return [process.poll() for process in self.processes]

    def terminate(self) -> None:
        """What a scheduler does first: SIGTERM to the launcher of each node."""
        # The brackets keep the shell itself from being found.
        found = 'grep -qa "[t]orch.distributed.run" $p/cmdline'
        each = f"for p in /proc/[0-9]*; do {found} && kill -TERM ${{p#/proc/}}; done; true"
        for number in range(len(self.processes)):
            self._cluster.node(number).run("sh", "-c", each)

    def text(self) -> str:
        return "\n".join(f"--- node {n}\n{log.read_text()[-6000:]}" for n, log in enumerate(self.logs))

    def full_text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def kill(self) -> None:
        """End the whole job at once, with its memory left where it is."""
        for number, process in enumerate(self.processes):
            space = self._cluster.nodes[number]
            if process.poll() is None and space is not None:
                # Every process of the node but the first, which holds it.
                each = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = 1 ] || [ $p = $$ ] || kill -9 $p; done"
                subprocess.run(space.command("sh", "-c", each), timeout=30, capture_output=True)
            process.kill()
            process.wait(30)
