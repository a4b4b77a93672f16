"""What is tried again, because it tells of the process or of the way to the data, and what is given up at once."""

from __future__ import annotations

import errno

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.lightning import attempts
from mlflashpoint.adapter.lightning.attempts import attempt, is_passing


class Ranks:
    """The store of a rank whose peers always say what it says, or no."""

    def __init__(self, *, others: bool = True, others_passing: bool = True) -> None:
        self.answers = {"key": others, "key/passing": others_passing}
        self.asked: list[tuple[str, bool]] = []

    def agree(self, key: str, ok: bool) -> bool:
        self.asked.append((key, ok))
        return ok and self.answers[key]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(attempts, "_PAUSES_S", (0.0, 0.0))


def failing(*errors: Exception):
    left = list(errors)

    def action() -> str:
        if left:
            raise left.pop(0)
        return "read"

    return action


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "no memory"), True),
        (OSError(errno.ETIMEDOUT, "no answer"), True),
        (OSError(errno.ESTALE, "stale"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError(), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:115] DefaultCPUAllocator: can't allocate memory"), True),
        (caused(RuntimeError("loading failed"), MemoryError()), True),
        (CheckpointException("load", {1: (MemoryError(), None)}), True),
        (CheckpointException("load", {0: (MemoryError(), None), 1: (ValueError("bad"), None)}), False),
        (FileNotFoundError(errno.ENOENT, "gone"), False),
        (PermissionError(errno.EACCES, "not yours"), False),
        (EOFError(), False),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), False),
        (TypeError("no checkpoint"), False),
    ],
    ids=repr,
)
def test_what_passes_is_told_from_what_is_wrong_with_the_data(error, passing):
    assert is_passing(error) is passing


def test_what_passes_is_tried_again():
    ranks = Ranks()
    assert attempt(ranks, "key", "reading", failing(MemoryError(), MemoryError())).value == "read"
    assert ranks.asked == [("key", False), ("key/passing", True)] * 2 + [("key", True)]


def test_what_does_not_pass_is_given_up_with_its_error():
    errors = [MemoryError(str(number)) for number in range(3)]
    tried = attempt(Ranks(), "key", "reading", failing(*errors))
    assert tried.value is None and tried.error is errors[-1]


def test_what_is_wrong_with_the_data_is_given_up_at_once():
    ranks = Ranks()
    error = EOFError()
    tried = attempt(ranks, "key", "reading", failing(error))
    assert tried.value is None and tried.error is error
    assert ranks.asked == [("key", False), ("key/passing", False)]


def test_a_rank_that_can_gives_up_with_one_that_finds_the_data_wrong():
    ranks = Ranks(others=False, others_passing=False)
    tried = attempt(ranks, "key", "reading", failing())
    assert tried.value is None and tried.error is None
    assert ranks.asked == [("key", True), ("key/passing", True)]
