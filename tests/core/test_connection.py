"""Which connection to the job's store a process talks on."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.connection import apart, drop, kept


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Slow(dist.TCPStore):
    """Takes its time for the first connection that it is asked for."""

    connecting = threading.Event()
    go_on = threading.Event()

    def clone(self):
        if not self.connecting.is_set():
            self.connecting.set()
            self.go_on.wait(20)
        return super().clone()


def test_one_connection_of_its_own_is_kept_for_each_store(store):
    own = kept(store)
    assert own is not store and kept(store) is own
    assert kept(dist.PrefixStore("other", store)) is not own
    assert apart(store) is not own


def test_channels_share_the_kept_connection(store):
    one, other = Channel(store, "p"), Channel(store, "p")
    one.post("key", 1)
    assert other.read("key") == 1
    assert one._base is other._base is kept(store)


def test_a_connection_that_was_given_up_is_replaced(store):
    own = kept(store)
    drop(store)
    drop(store)
    assert kept(store) is not own


def test_the_connection_to_another_store_stays(store):
    other = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    own, others = kept(store), kept(other)
    drop(store)
    assert kept(other) is others and kept(store) is not own


def test_a_connection_that_took_the_place_of_the_one_that_hangs_stays(store):
    hangs = kept(store)
    drop(store, hangs)
    new = kept(store)
    # A second user of the one that hangs gives it up later.
    drop(store, hangs)
    assert kept(store) is new


def test_it_goes_with_the_store(store):
    view = dist.PrefixStore("p", store)
    own = weakref.ref(kept(view))
    del view
    gc.collect()
    assert own() is None


def test_a_store_without_connections_is_used_itself():
    store = dist.HashStore()
    assert kept(store) is store


def test_who_waits_for_a_new_connection_holds_up_nobody_else():
    store = Slow("127.0.0.1", 0, None, True, wait_for_workers=False)
    first = threading.Thread(target=kept, args=(store,), daemon=True)
    first.start()
    assert Slow.connecting.wait(20)
    started = time.monotonic()
    own = kept(store)
    assert time.monotonic() - started < 10
    Slow.go_on.set()
    first.join(20)
    assert kept(store) is own


def test_a_forked_child_has_a_connection_of_its_own(store):
    own = kept(store)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"same" if kept(store) is own else b"new")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"new"
    assert own.add("n", 1) == 1
