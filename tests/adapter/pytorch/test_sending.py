"""A staged state is sent to a checkpoint process whole; what of it can't be sent is refused there, by key."""

import collections
import dataclasses
import multiprocessing
import os
import pickle
import resource
import threading
import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from mlflashpoint.adapter.pytorch import StructureSavePlanner
from mlflashpoint.adapter.pytorch.missing import missing_of
from mlflashpoint.adapter.pytorch.sending import packed
from mlflashpoint.adapter.pytorch.stager import ReusedStager
from mlflashpoint.errors import StateTypeError, StoreFullError

Pair = collections.namedtuple("Pair", "one other")


@dataclasses.dataclass
class Moments:
    mean: torch.Tensor


class Marked(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    """A tensor whose bytes lie in another one, as those of quantised weights do; it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner, offset=0):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, storage_offset=offset
        )

    def __init__(self, inner, offset=0):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda a: a.inner if isinstance(a, Wrapper) else a, (args, kwargs or {}))
        return tree_map(lambda a: Wrapper(a) if type(a) is torch.Tensor else a, func(*args, **kwargs))


class Counted:
    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, ()


class Unreadable:
    def __reduce__(self):
        return _fail, ("not here",)


def _fail(text):
    raise RuntimeError(text)


def arrived(state):
    """What arrives of the state."""
    return sent(ReusedStager().stage(state))


def sent(staged):
    return pickle.loads(ForkingPickler.dumps(staged))


def refusal(state):
    """Why the plan of a state that has arrived is refused."""
    planner = StructureSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return missing_of(planner.create_local_plan())


def files_left(hoped):
    """Number of open files, once it is ``hoped`` or less: the thread that gives them away closes its end later."""
    give_up = time.monotonic() + (0.3 if hoped is None else 20)
    while True:
        count = len(os.listdir("/proc/self/fd"))
        if (hoped is not None and count <= hoped) or time.monotonic() > give_up:
            return count
        time.sleep(0.02)


def exit_of(run):
    """How a child process that runs it ends: 0, or the signal that ends it."""
    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    child.join(60)
    return child.exitcode


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_state_that_can_be_sent_arrives_whole():
    state = {"w": torch.ones(3), "deep": [{"b": b"x", "set": {1, 2}}], "pair": Pair(torch.arange(3), 1), "step": 3}
    found = arrived(state)
    assert torch.equal(found.pop("w"), state.pop("w"))
    pair = found.pop("pair")
    assert type(pair) is Pair and pair.one.tolist() == [0, 1, 2] and state.pop("pair").other == pair.other
    assert found == state


def test_dtensors_arrive_as_they_were(mesh):
    state = {name: DTensor.from_local(torch.arange(4.0) + add, mesh, [Shard(0)]) for add, name in enumerate("ab")}
    found = arrived({**state, "both": tuple(state.values())})
    for name, one in state.items():
        assert type(found[name]) is DTensor and found[name].placements == one.placements
        assert torch.equal(found[name].to_local(), one.to_local())
    assert [one.to_local().tolist() for one in found["both"]] == [one.to_local().tolist() for one in state.values()]


@pytest.mark.parametrize("offset", [0, 2])
def test_a_tensor_without_memory_of_its_own_does_not_end_the_process(mesh, offset):
    def send():
        inner = Wrapper(torch.arange(4.0), offset)
        part = DTensor.from_local(inner, mesh, [Shard(0)], run_check=False)
        # As a planner of one's own would leave it, past the stager, too.
        for state in ({"w": inner}, {"w": part}, {"w": (inner, part)}):
            arrived(state)

    assert exit_of(send) == 0


def test_an_object_that_cant_be_pickled_is_refused_by_key_and_the_rest_arrives():
    class Local:
        pass

    found = arrived({"w": torch.ones(3), "deep": {"local": Local()}, "step": 3})
    assert found["w"].tolist() == [1, 1, 1] and found["step"] == 3
    error = refusal(found)
    assert isinstance(error, StateTypeError) and "'deep.local' is a" in str(error) and "remedy" in str(error)


def test_an_object_that_cant_be_read_where_it_arrives_is_refused_by_key():
    assert "'deep.it' is a" in str(refusal(arrived({"deep": {"it": Unreadable()}})))


def test_a_key_that_cant_be_pickled_is_refused():
    assert "key" in str(refusal(arrived({lambda: 0: torch.ones(2)})))


def test_a_state_that_nests_too_deep_to_be_sent_is_refused():
    deep = torch.ones(1)
    for _ in range(3000):
        deep = {"k": deep}
    (missing,) = packed({"deep": deep}).values()
    assert "nested too deep" in str(missing.error("state"))


def test_what_is_refused_of_one_save_is_not_of_another_that_is_under_way():
    stager = ReusedStager()
    first = stager.stage({"w": torch.ones(2), "own": (torch.ones(2), threading.local)})
    second = stager.stage({"w": torch.ones(2), "own": threading.Lock()})
    third = stager.stage({"w": torch.zeros(2), "own": 3})
    assert sent(first)["own"][1] is threading.local
    assert "'own'" in str(refusal(sent(second)))
    assert sent(third)["own"] == 3


def test_an_object_is_pickled_once():
    staged = ReusedStager().stage({"own": (Counted(), torch.ones(3))})
    Counted.pickled = 0
    sent(staged)
    assert Counted.pickled == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_saves_leave_no_file_open():
    stager, before = ReusedStager(), 0
    for step in range(6):
        state = {
            "w": torch.ones(300),
            "tuple": (torch.ones(9), torch.zeros(5)),
            "object": Moments(torch.ones(4)),
            "marked": torch.ones(3).as_subclass(Marked),
            "sparse": torch.eye(5).to_sparse(),
            "refused": (torch.ones(7), threading.Lock()),
            "step": step,
        }
        sent(stager.stage(state))
        before = before or files_left(None)
    assert files_left(before) <= before


def test_what_was_lent_for_an_object_that_is_refused_is_taken_back(monkeypatch):
    share, shared = torch.UntypedStorage._share_fd_cpu_, []

    def full(storage):
        if storage.nbytes() == 8:
            raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")
        shared.append(storage)
        return share(storage)

    stager, before = ReusedStager(), 0
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    for _ in range(4):
        found = sent(stager.stage({"a": {"own": (torch.ones(3), torch.ones(2))}}))
        shared.clear()
        before = before or files_left(None)
    error = refusal(found)
    assert isinstance(error, StoreFullError) and "'a.own'" in str(error) and "/dev/shm" in str(error)
    assert files_left(before) <= before


def test_it_arrives_by_torchs_other_way_of_sharing_too():
    def files():
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}

    before = files()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        found = arrived({"w": torch.arange(3), "own": (torch.ones(2),), "refused": (torch.ones(4), threading.Lock())})
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
    assert found["w"].tolist() == [0, 1, 2] and found["own"][0].tolist() == [1, 1]
    del found
    assert files() == before


def test_tensors_of_one_state_take_one_file(mesh):
    state = {str(n): DTensor.from_local(torch.ones(4), mesh, [Shard(0)]) for n in range(50)}
    staged = ReusedStager().stage({**state, "plain": torch.ones(3)})
    before = len(os.listdir("/proc/self/fd"))
    kept = ForkingPickler.dumps(staged)
    assert len(os.listdir("/proc/self/fd")) < before + 10
    pickle.loads(kept)


def test_too_many_open_files_are_named_with_their_remedy():
    staged = ReusedStager().stage({"a": {"w": torch.ones(3)}, "own": (torch.ones(3),)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sent(ReusedStager().stage({"w": torch.ones(3)}))
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        kept = ForkingPickler.dumps(staged)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    error = refusal(pickle.loads(kept))
    assert isinstance(error, StoreFullError)
    assert "'a.w'" in str(error) and "ulimit -n" in str(error) and "file_system" in str(error)
