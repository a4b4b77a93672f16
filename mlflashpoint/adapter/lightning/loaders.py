"""Data loaders that can be resumed, in a fit that goes on from memory: where they begin, and how an epoch ends."""

from __future__ import annotations

import copy
import inspect
from typing import Any


def put_back(loop: Any) -> None:
    """Put a loader's position back that was set up before the loops were restored.

    A recipe that asks for ``estimated_stepping_batches`` in ``configure_optimizers`` sets it up there, and Lightning
    puts a position back only when it does that.

    Args:
        loop: the fit loop, restored, and about to run.
    """
    if loop._combined_loader is None or not loop._combined_loader_states_to_load:
        return
    loop._load_combined_loader_states()
    iter(loop._data_fetcher)


def pass_the_end(loop: Any) -> None:
    """Let loaders that can be resumed know that the epoch is over.

    What they have stored says which batch was given last, not that the epoch has no more. Such a loader gives the next
    epoch, for which the loop does not ask it to begin anew, what was left of the old one, or no batch at all.

    Args:
        loop: the fit loop, whose loaders stand where the last batch of an epoch was given.
    """
    combined = loop._combined_loader
    states = combined._state_dicts()
    if not states:
        return
    left = iter(copy.deepcopy(states))
    for loader, given in zip(combined.flattened, combined._iterator.iterators, strict=True):
        if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
            continue
        state = next(left)
        if not _was_given_whole(loader, loop.max_batches):
            _leave_the_rest(loader, state)
        elif next(given, None) is not None:
            # It begins the next epoch by itself.
            loader.load_state_dict(state)
    iter(loop._data_fetcher)


def _was_given_whole(loader: Any, batches: float) -> bool:
    """Whether an epoch of so many batches ends where the loader's own data does, once or again and again.

    It does not if the Trainer gives the epoch only a part, or if the epoch is as long as another loader.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return batches == float("inf")
    return length > 0 and batches % length == 0


def _leave_the_rest(loader: Any, state: Any) -> None:
    """Let the next pass of ``loader``, which is in the middle of its data, begin like one without a resume."""
    loader.load_state_dict(copy.deepcopy(state))
    # The first pass after a load goes on; a generator sees that only with its first batch.
    if inspect.isgenerator(iter(loader)):
        if _always_goes_on(loader, state):
            loader.load_state_dict(state)
        else:
            _take(loader, state, 1, 0)


def _always_goes_on(loader: Any, state: Any) -> bool:
    """Whether each of its passes takes up where the last one was left, as with an endless stream."""
    try:
        return bool(_take(loader, state, 1, 1) == _take(loader, state, 2, 0))
    except (TypeError, ValueError, RuntimeError):
        # states that can't be compared
        return False


def _take(loader: Any, state: Any, first: int, second: int) -> Any:
    """The state of ``loader`` after so many batches of a first pass from ``state`` on, and of a second pass."""
    loader.load_state_dict(copy.deepcopy(state))
    for batches in (first, second):
        given = iter(loader) if batches else iter(())
        for _ in range(batches):
            next(given, None)
    return copy.deepcopy(loader.state_dict())
