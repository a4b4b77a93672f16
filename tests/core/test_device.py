"""The real thing needs a CUDA device: these tests run where there is one."""

import pytest
import torch

from mlflashpoint.core.arena import Arena
from mlflashpoint.core.device import Cuda
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.saver import ShardSaver
from tests.core.shard_helpers import FIELDS, differences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def round_trip(seat, saver):
    state = {
        "w": torch.randn(1 << 20, device="cuda"),
        "t": torch.randn(30, 40, device="cuda").t()[:, ::2],
        "c": torch.randn(8, dtype=torch.complex64, device="cuda").conj(),
        "h": torch.randn(5),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    arena = Arena(seat)
    arena.reserve(1, saver.size_of(state))
    staged = saver.stage(arena.slots[0], state)
    for tensor in state.values():
        tensor.mul_(0)
    saver.commit(staged, step=1, **FIELDS)
    with ShardReader.open(arena.slots[0].path) as reader:
        assert differences(reader.state(), expected) == []
        reader.state(into=state)
    assert differences({name: tensor.cpu() for name, tensor in state.items()}, expected) == []
    arena.close()


def test_mutation_right_after_staging_never_reaches_the_store(seat):
    round_trip(seat, ShardSaver())


def test_where_page_locking_is_refused_the_copies_are_right_and_the_job_sees_no_error(seat):
    class Refused(Cuda):
        def pin(self, region):
            return super().pin(region[:0])

    round_trip(seat, ShardSaver(accelerators={"cuda": Refused()}))
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_work_that_the_device_was_given_before_is_in_the_shard(seat):
    saver, arena = ShardSaver(), Arena(seat)
    tensor = torch.zeros(1 << 24, device="cuda")
    arena.reserve(1, tensor.nbytes)
    for _ in range(50):
        tensor.add_(1)
    saver.commit(saver.stage(arena.slots[0], [tensor]), step=1, **FIELDS)
    with ShardReader.open(arena.slots[0].path) as reader:
        assert bool(reader.state()[0].eq(50).all())
    arena.close()
