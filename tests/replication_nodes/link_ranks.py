"""One rank of the job of test_links.py: it asks the other one again and again while its link is cut, and afterwards.

Usage: link_ranks.py WHAT DURABLE
"""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapter" / "pytorch"))

import torch.distributed as dist
from launch import report

from mlflashpoint.errors import FlashpointError
from mlflashpoint.replication.gloo import GlooTransport
from mlflashpoint.replication.transport import Identity

#: a connection that is asked for in the meantime comes about afterwards: the system tries again after one and three s
CUT_S = 2.5

dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
store = dist.PrefixStore("transport", dist.distributed_c10d._get_default_store())
transport = GlooTransport(store, Identity("job", "group", 1, rank))
transport.offer("key", b"header", [memoryview(bytearray(1000))], timeout_s=1)


def asked(timeout_s):
    try:
        transport.describe(1 - rank, "key", timeout_s=timeout_s)
    except FlashpointError:
        return False
    return True


before = asked(20)
dist.barrier()
if rank == 0:
    subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
end, during = time.monotonic() + CUT_S, []
while time.monotonic() < end:
    during.append(asked(0.3))
if rank == 0:
    subprocess.run(["ip", "link", "set", "eth1", "up"], check=True)
end = time.monotonic() + 3
while time.monotonic() < end:
    time.sleep(0.1)
    after = asked(2)
dist.barrier()
report({"before": before, "during": during[-1], "after": after})
os._exit(0)
