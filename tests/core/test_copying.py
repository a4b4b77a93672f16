import os
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.core import copying
from mlflashpoint.core.copying import copy_tensors, in_two_threads, spans_of

MIB = 1 << 20


def copy(targets, sources):
    spans = spans_of([(tensor.numel(), tensor.nbytes) for tensor in targets])
    copy_tensors(targets, sources, spans, sum(tensor.nbytes for tensor in targets))


def noise(elements):
    return torch.arange(elements, dtype=torch.int64).mul_(2654435761).to(torch.uint8)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(copying, "BLOCK", 5000)
    monkeypatch.setattr(copying, "HUGE_BLOCK", 40_000)
    monkeypatch.setattr(copying, "LARGE", 300)
    monkeypatch.setattr(copying, "_WORTH_A_THREAD", 1000)


@pytest.mark.usefixtures("small_blocks")
def test_every_byte_of_every_size_is_copied_once():
    sizes = [0, 1, 299, 300, 301, 4999, 5000, 5001, 10_000, 10_001, 79_999, 80_000, 123_457, 0, 7]
    sources = [noise(size) for size in sizes]
    targets = [torch.zeros(size + 2, dtype=torch.uint8) for size in sizes]
    copy([target[1:-1] for target in targets], sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target[1:-1], source)
        assert target[0] == target[-1] == 0


shapes = st.lists(st.integers(1, 24), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_any_mixture_of_strides_is_copied(cases):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BLOCK": 3000, "HUGE_BLOCK": 20_000, "LARGE": 100, "_WORTH_A_THREAD": 100}.items():
            patch.setattr(copying, name, value)
        sources, targets = [], []
        for shape, turned, turned_target, conjugate in cases:
            source = torch.randn(shape, dtype=torch.complex64)
            source = source.transpose(0, -1).contiguous().transpose(0, -1) if turned else source
            target = torch.zeros(shape, dtype=torch.complex64)
            targets.append(target.transpose(0, -1).contiguous().transpose(0, -1) if turned_target else target)
            sources.append(source.conj() if conjugate else source)
        copy(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)


def test_very_large_tensors_are_moved_in_pieces_the_c_library_streams():
    spans = spans_of([(300 * MIB, 300 * MIB), (20 * MIB, 20 * MIB)])
    assert [span.length // MIB for span in spans] == [128, 128, 44, 8, 8, 4]


@pytest.mark.usefixtures("small_blocks")
def test_an_error_of_either_thread_is_raised_and_nothing_is_written_afterwards():
    done = []

    def fail():
        done.append(threading.current_thread().name)
        raise ValueError("broken")

    for failing in range(4):
        done.clear()
        units = [fail if number == failing else (lambda: done.append("good")) for number in range(4)]
        with pytest.raises(ValueError, match="broken"):
            in_two_threads(units, 10_000)
        count = len(done)
        # A unit that is still to run, now that the call is over, would show here.
        in_two_threads([lambda: None] * 4, 10_000)
        assert len(done) == count


@pytest.mark.usefixtures("small_blocks")
def test_what_is_done_meanwhile_is_done_once_and_its_error_is_raised():
    done = []
    in_two_threads([lambda: None] * 3, 10_000, lambda: done.append(1))
    in_two_threads([lambda: None], 1, lambda: done.append(2))
    assert done == [1, 2]
    with pytest.raises(ZeroDivisionError):
        in_two_threads([lambda: None] * 3, 10_000, lambda: 1 / 0)


def test_no_thread_exists_before_a_large_copy_and_one_afterwards_also_in_a_forked_child():
    copy([torch.zeros(MIB)] * 4, [torch.ones(MIB)] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 1
        try:
            before = threading.active_count()
            copy([torch.zeros(10)], [torch.ones(10)])
            small = threading.active_count()
            targets = [torch.zeros(4 * MIB) for _ in range(4)]
            copy(targets, [torch.ones(4 * MIB)] * 4)
            copy(targets, [torch.ones(4 * MIB)] * 4)
            whole = all(bool(target.eq(1).all()) for target in targets)
            status = 0 if (before, small, threading.active_count(), whole) == (1, 1, 2, True) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
