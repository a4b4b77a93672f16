"""The nodes of the tests end with the test, however that ends."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.replication_nodes.cluster import ROOT

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

MAKE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.replication_nodes.cluster import Cluster
made = Cluster(2)
print(made.folder, *(node.pid for node in (*made.nodes, made._switch)), flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_test_that_is_killed_leaves_no_node(nodes_allowed):
    process = subprocess.Popen([sys.executable, "-c", MAKE, str(ROOT)], stdout=subprocess.PIPE, text=True)
    folder, *pids = process.stdout.readline().split()
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.communicate()
    give_up = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < give_up:
        time.sleep(0.05)
    shutil.rmtree(folder)
    assert not any(alive(pid) for pid in pids)


def test_nodes_have_names_networks_and_memory_of_their_own(cluster):
    nodes = cluster(2)
    assert [nodes.node(number).run("hostname").strip() for number in (0, 1)] == ["node-0", "node-1"]
    nodes.node(0).run("touch", "/dev/shm/mine")
    assert nodes.node(1).run("ls", "/dev/shm") == ""
    assert not os.path.exists("/dev/shm/mine")
    nodes.kill_node(0)
    nodes.boot(0)
    assert nodes.node(0).run("ls", "/dev/shm") == ""
