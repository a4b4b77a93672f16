"""The connection to the job's store: one of our own in each process, kept as long as the job keeps the store.

Of our own, so that neither the job nor we ever wait for the other's calls. Kept, because a new one may take seconds (a
name server that does not answer), and because on one that stands it is known at once that the store's host is gone.
"""

from __future__ import annotations

import logging
import os
import threading
from weakref import WeakKeyDictionary

from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("mlflashpoint.core")

_kept: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()
_lock = threading.Lock()


def kept(store: Store) -> Store:
    """The connection to ``store``, made at the first call; the store itself where there can be none."""
    with _lock:
        found = _kept.get(store)
    if found is not None:
        return found
    # Not under the lock: a host that is dead holds up whoever connects.
    made = apart(store)
    if made is store:
        return store
    with _lock:
        return _kept.setdefault(store, made)


def apart(store: Store) -> Store:
    """Another connection, for whoever may keep one busy; the store itself where there can be none."""
    # Before torch 2.8 a store can't be cloned.
    if hasattr(store, "clone"):
        try:
            made: Store = store.clone()
            return made
        except Exception as error:
            log.debug("the job's own connection to its store is used: %s", error)
    return store


def renewed(store: Store, broken: Store) -> Store:
    """A new connection in the place of one that is broken, which stays if there can be no other; may take long."""
    with _lock:
        found = _kept.get(store)
    if found is not None and found is not broken:
        return found
    made = apart(store)
    if made is not store:
        with _lock:
            if _kept.get(store) in (None, broken):
                _kept[store] = made
            return _kept[store]
    return broken


def drop(store: Store, hangs: Store | None = None) -> None:
    """Give up the kept connection, on which a call hangs; the next use makes another one.

    Args:
        store: the job's.
        hangs: the connection that is meant: one that has taken its place meanwhile stays. None means the present one.
    """
    with _lock:
        if hangs is None or _kept.get(store) is hangs:
            _kept.pop(store, None)


def _forget_in_child() -> None:
    # Parent and child on one socket would read each other's answers.
    global _kept, _lock
    _kept, _lock = WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
