"""A staged state as it is sent to a checkpoint process.

``AsyncCheckpointerType.PROCESS`` pickles the state on each rank by itself, its tensors through files in /dev/shm. A
rank that fails there never begins the save, and DCP lets the others wait for it for half an hour. So what can't be sent
is left out, and the writer, which is sent with the state, carries the reason to where it is an error on all ranks.
"""

from __future__ import annotations

import errno
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from mlflashpoint.adapter.pytorch.structure import leaves_of, rebuild
from mlflashpoint.errors import FlashpointError, StateTypeError, StoreFullError

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})


def sendable(state: dict[str, Any]) -> tuple[dict[str, Any], FlashpointError | None]:
    """The state as it can be pickled, and why something had to be left out of it.

    Moves its tensors to shared memory, as pickling them does.
    """
    leaves = leaves_of(state)
    problems = [_problem(leaf) for leaf in leaves]
    bad = next((place for place, problem in enumerate(problems) if problem is not None), None)
    if bad is None:
        return state, None
    kept = (None if problem else leaf for leaf, problem in zip(leaves, problems, strict=True))
    found = problems[bad]
    assert found is not None
    return rebuild(state, kept), _refusal(_key(state, leaves[bad]), leaves[bad], found)


def _problem(leaf: Any) -> Exception | None:
    kind = type(leaf)
    if kind in _PLAIN:
        return None
    try:
        if kind in _TENSORS and leaf.layout is torch.strided and not leaf.is_nested:
            inner = leaf._local_tensor if kind is DTensor else leaf
            if inner.device.type == "cpu":
                inner.untyped_storage().share_memory_()
        else:
            ForkingPickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(leaf)
    except Exception as error:
        return error
    return None


def _refusal(key: str, leaf: Any, problem: Exception) -> FlashpointError:
    if isinstance(leaf, torch.Tensor) and os.strerror(errno.ENOSPC) in str(problem):
        return StoreFullError(
            f"there is no room in /dev/shm, through which {key!r} is sent to the checkpoint process: {problem}",
            remedy="give /dev/shm more room, or use AsyncCheckpointerType.THREAD, which needs none of it",
        )
    return StateTypeError(
        f"{key!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which can't be sent to the checkpoint "
        f"process: {type(problem).__name__}: {problem}",
        remedy="leave it out, store plain data in its place, or register how to pickle its type (copyreg.pickle)",
    )


def _key(state: dict[str, Any], leaf: Any) -> str:
    """The leaf's name in the checkpoint."""
    flat, _ = flatten_state_dict(state)
    return next((name for name, value in flat.items() if value is leaf), "?")


class _Nowhere:
    """A file that keeps nothing: what is pickled may be large."""

    def write(self, data: Any) -> int:
        return len(data)
