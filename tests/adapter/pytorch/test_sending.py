"""What of a staged state can't be sent to a checkpoint process is left out there, and told by key."""

import pickle
import threading

import torch

from mlflashpoint.adapter.pytorch import sending
from mlflashpoint.adapter.pytorch.stager import ReusedStager
from mlflashpoint.errors import StateTypeError, StoreFullError


def sent(state):
    """What arrives of the state, and why something does not."""
    stager = ReusedStager()
    staged = stager.stage(state)
    return pickle.loads(pickle.dumps(staged)), stager.unsendable()


def test_a_state_that_can_be_sent_arrives_whole():
    state = {"w": torch.ones(3), "deep": [{"b": b"x", "set": {1, 2}}], "step": 3}
    arrived, problem = sent(state)
    assert problem is None
    assert torch.equal(arrived.pop("w"), state.pop("w")) and arrived == state


def test_an_object_that_cant_be_pickled_is_told_by_key_and_the_rest_arrives():
    arrived, problem = sent({"w": torch.ones(3), "deep": {"lock": threading.Lock()}, "step": 3})
    assert (arrived["deep"], arrived["step"]) == ({"lock": None}, 3)
    assert isinstance(problem, StateTypeError)
    assert "'deep.lock' is a _thread.lock" in str(problem) and "remedy" in str(problem)


def test_it_is_told_too_beside_a_tensor_that_dcp_stages():
    class Marked(torch.Tensor):
        pass

    state = {"m": torch.ones(3).as_subclass(Marked), "lock": threading.Lock()}
    assert "'m'" in str(sent(state)[1])


def test_a_tensor_for_which_shared_memory_has_no_room_is_told_by_key(monkeypatch):
    def full(storage):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", full)
    _, problem = sending.sendable({"a": {"w": torch.ones(3)}})
    assert isinstance(problem, StoreFullError)
    assert "'a.w'" in str(problem) and "/dev/shm" in str(problem)


def test_what_was_staged_and_is_gone_is_no_reason():
    stager = ReusedStager()
    stager.stage({"lock": threading.Lock()})
    assert stager.unsendable() is None
