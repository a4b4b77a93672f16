import os
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.core import copying, streaming
from mlflashpoint.core.copying import Schedule, in_two_threads

MIB = 1 << 20


def copy(targets, sources, raw=None):
    raw = [True] * len(targets) if raw is None else raw
    schedule = Schedule([tensor.nbytes for tensor in targets], raw)
    to, of = (schedule.addresses([tensor.data_ptr() for tensor in side]) for side in (targets, sources))
    odd = [[side[place] for place in schedule.odd] for side in (targets, sources)]
    schedule.copy(to, of, *odd)


def noise(elements):
    return torch.arange(elements, dtype=torch.int64).mul_(2654435761).to(torch.uint8)


@pytest.fixture(params=["own library", "C library"])
def library(request, monkeypatch):
    """Copies run with our own library, if it was built, and without."""
    if request.param == "C library":
        monkeypatch.setattr(streaming, "_library", lambda: None)
    elif not streaming.available():
        pytest.skip("the library was not built: pip install -e . on a machine with a compiler")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(copying, "BLOCK", 5000)
    monkeypatch.setattr(copying, "PLAIN_BLOCK", 40_000)
    monkeypatch.setattr(copying, "_WORTH_A_THREAD", 1000)


SIZES = [0, 1, 63, 64, 65, 299, 4095, 4999, 5000, 5001, 10_000, 16_384, 16_385, 79_999, 80_000, 123_457, 0, 7]


@pytest.mark.usefixtures("library", "small_blocks")
@pytest.mark.parametrize("shift", [0, 1, 16, 63])
def test_every_byte_of_every_size_is_copied_once_from_and_to_any_address(shift):
    sources = [noise(size + shift)[shift:] for size in SIZES]
    targets = [torch.zeros(size + 200, dtype=torch.uint8) for size in SIZES]
    copy([target[100 - shift : 100 - shift + size] for target, size in zip(targets, SIZES, strict=True)], sources)
    for target, source in zip(targets, sources, strict=True):
        begin = 100 - shift
        assert torch.equal(target[begin : begin + len(source)], source)
        assert not target[:begin].any() and not target[begin + len(source) :].any()


@pytest.mark.usefixtures("library")
def test_without_small_tensors_of_no_bytes_too():
    copy([], [])
    copy([torch.empty(0)], [torch.empty(0)])


shapes = st.lists(st.integers(1, 24), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_what_is_not_raw_is_copied_by_its_elements(cases):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BLOCK": 3000, "PLAIN_BLOCK": 20_000, "_WORTH_A_THREAD": 100}.items():
            patch.setattr(copying, name, value)
        sources, targets, raw = [], [], []
        for shape, turned, conjugate in cases:
            source = torch.randn(shape, dtype=torch.complex64)
            source = source.transpose(0, -1).contiguous().transpose(0, -1) if turned else source
            sources.append(source.conj() if conjugate else source)
            targets.append(torch.zeros(shape, dtype=torch.complex64))
            raw.append(source.is_contiguous() and not conjugate)
        copy(targets, sources, raw)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)


def test_very_large_tensors_are_moved_in_pieces_that_the_library_at_hand_streams(monkeypatch):
    sizes = [300 * MIB, 20 * MIB]
    monkeypatch.setattr(streaming, "available", lambda: False)
    assert [length // MIB for length in Schedule(sizes, [True] * 2)._lengths] == [128, 128, 44, 8, 8, 4]
    monkeypatch.setattr(streaming, "available", lambda: True)
    assert max(Schedule(sizes, [True] * 2)._lengths) == 8 * MIB


def test_a_library_of_another_kind_of_machine_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "_stream.abi3.so").write_bytes(b"\x7fELF of another machine")
    monkeypatch.setattr(streaming, "__file__", str(tmp_path / "streaming.py"))
    assert streaming._library.__wrapped__() is None


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
