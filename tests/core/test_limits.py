"""What a long run must not use up: memory, file descriptors, files; and what many tensors need."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

HUNDRED_SAVES = """
import ctypes, gc, os, resource, sys, threading
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import torch
from mlflashpoint.core.arena import Arena
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.saver import ShardSaver
from tests.core.shard_helpers import FIELDS

seat = Path(sys.argv[1])
state = {"many": [torch.full((n % 50,), float(n)) for n in range(5000)], "large": torch.zeros(2 << 20), "step": 0}
saver, arena = ShardSaver(), Arena(seat)
arena.reserve(2, saver.size_of(state))

def used():
    gc.collect()
    # What the allocator keeps for later is no leak, and varies.
    ctypes.CDLL(None).malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir(seat)), threading.active_count()

for step in range(140):
    state["step"] = step
    state["large"].fill_(step)
    saver.commit(saver.stage(arena.slots[step % 2], state), step=step, **FIELDS)
    if step % 20 == 19:
        with ShardReader.open(arena.slots[step % 2].path) as reader:
            reader.verify()
            reader.state(into=state)
        assert state["step"] == step and bool(state["large"].eq(step).all())
    if step == 39:
        before = used()
after = used()
print(before, after)
assert after[1:] == before[1:], "descriptors, files or threads"
assert after[0] - before[0] < 1 << 20, "memory"
assert after[1] < 40
"""


def test_a_hundred_more_saves_of_5000_tensors_with_256_descriptors_use_nothing_more(seat):
    done = subprocess.run(
        [sys.executable, "-c", HUNDRED_SAVES, str(seat)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
