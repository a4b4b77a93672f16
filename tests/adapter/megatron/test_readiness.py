"""What the ranks agree on before a collective is named by the store's own rounds, not by those of one that is gone."""

import gc

import pytest

from mlflashpoint.adapter.megatron.readiness import all_ready
from mlflashpoint.errors import PeerError, StateTypeError


class Talk:
    """A channel that notes under which names something was said."""

    def __init__(self, said):
        self.said = said

    def under(self, name):
        self.said.append(name)
        return self

    def decide(self, key, value):
        pass

    def read(self, key):
        return "rank 1: it failed"


class Store:
    """One rank of two, which never agree."""

    rank, world_size = 0, 2

    def __init__(self):
        self.said = []

    def channel(self, role):
        return Talk(self.said)

    def agree(self, key, ok):
        return False


def names_of(rounds):
    store = Store()
    for _ in range(rounds):
        with pytest.raises(PeerError, match="rank 1: it failed"):
            all_ready(store, "save", None)
    return store.said


def test_each_new_store_begins_its_rounds_anew():
    found = []
    for _ in range(20):
        found.append(names_of(2))
        # The next one may get its place in memory.
        gc.collect()
    assert found == [["megatron/save/1", "megatron/save/2"]] * 20


def test_the_rank_that_has_the_problem_raises_it():
    with pytest.raises(StateTypeError):
        all_ready(Store(), "save", StateTypeError("odd"))
