"""The garbage collector stays away from what is made at once."""

import gc
import threading

import pytest

from mlflashpoint.core.collector import no_collections


@pytest.fixture(autouse=True)
def left_as_it_was():
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_off_inside_and_as_before_afterwards(on):
    (gc.enable if on else gc.disable)()
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is on


def test_it_is_on_again_after_an_error():
    gc.enable()
    with pytest.raises(KeyError), no_collections():
        raise KeyError
    assert gc.isenabled()


def test_another_thread_leaves_it_alone():
    gc.enable()
    seen = []

    def parse():
        with no_collections():
            seen.append(gc.isenabled())

    thread = threading.Thread(target=parse)
    thread.start()
    thread.join(10)
    assert seen == [True]
