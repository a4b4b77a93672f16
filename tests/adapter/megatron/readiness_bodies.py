"""What the ranks do in the tests of what they ask each other: real processes, and one of them meets with trouble."""

import contextlib
import os
import socket
import time
from datetime import timedelta

from mlflashpoint.adapter.megatron import readiness
from mlflashpoint.adapter.megatron.readiness import all_ready
from mlflashpoint.adapter.pytorch.script import council
from mlflashpoint.core.channel import Channel
from mlflashpoint.core.meeting import Meeting
from mlflashpoint.errors import FlashpointError, PeerError
from tests.adapter.pytorch.script.council_bodies import begin

_others: set[int] = set()


def asked(version, deadline_s=30.0, what="save"):
    """What the question ends with, and the seconds that it takes."""
    began = time.monotonic()
    try:
        found = all_ready(what, deadline_s=deadline_s, version=version)
    except FlashpointError as error:
        found = type(error).__name__
    return found, time.monotonic() - began


def fails_once(name, key, *, behind=False):
    """From now on the next call of ``Channel.name`` for ``key`` fails, before the store has it or behind that."""
    original = getattr(Channel, name)

    def failing(self, first, *args):
        if first != key:
            return original(self, first, *args)
        setattr(Channel, name, original)
        if behind:
            original(self, first, *args)
        raise PeerError("the job's store did not answer")

    setattr(Channel, name, failing)


def stumbles(me, where, form, name, key, behind=False):
    """Rank 1's store fails once; what each rank is told then, and at the next question."""
    found = []
    for number in range(2):
        if (me.rank, number) == (1, 0):
            fails_once(name, key, behind=behind)
        # Rank 1 has to wait for the outcome.
        time.sleep(0.3 if (me.rank, number) == (0, 0) and name == "read" else 0)
        found.append(asked(f"{where}-{number}")[0] if form == "readiness" else council.agreed(True))
    return found


def misses(me, where, late, comes):
    """Rank 1 misses a save: what the next one ends with, which rank ``late`` begins a moment later.

    With ``comes`` rank 1 begins the one that it has missed yet, when rank 0 has given it up.
    """
    found = [asked(f"{where}-missed", 0.4, what="preprocess")] if me.rank == 0 else []
    me.meet(f"given up {where}")
    if me.rank == 1 and comes:
        found.append(asked(f"{where}-missed", what="preprocess"))
    time.sleep(0.3 if me.rank == late else 0)
    return [*found, asked(where, what="preprocess"), asked(where)]


def missed_first(me, where, late):
    """Rank 1 misses the very first save, at which the ranks were to meet."""
    readiness._meeting = Meeting(f"apart-{where}")
    return misses(me, where, late, False)


def sockets():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                found.add(int(number))
    return found


def cut():
    """Break what this rank asks the others by."""
    for number in sockets() - _others:
        with socket.socket(fileno=os.dup(number)) as one:
            one.shutdown(socket.SHUT_RDWR)


def cuts_once_it_waits(me, where):
    """From now on the connection breaks when this rank first looks for an outcome, which rank 0 is told."""
    original = Channel.read

    def reading(self, key):
        if key == "outcome":
            Channel.read = original
            cut()
            me.store.set(f"cut {where}", "")
        return original(self, key)

    Channel.read = reading


def breaks(me, where, waiting):
    """Rank 1's connection to the store breaks, before a question or while it waits for the outcome."""
    if me.rank == 1:
        if waiting:
            cuts_once_it_waits(me, where)
        else:
            cut()
            time.sleep(0.4)
    elif waiting:
        me.store.wait([f"cut {where}"], timedelta(seconds=20))
    return [asked(where)[0], council.agreed(True)]


SCENES = {
    "broken before": (breaks, False),
    "broken while it waits": (breaks, True),
    "ready": (stumbles, "readiness", "read", "outcome"),
    "ready, tidying": (stumbles, "readiness", "add", "read"),
    "council": (stumbles, "council", "read", "outcome"),
    "council, tidying": (stumbles, "council", "add", "read"),
    "not counted": (stumbles, "readiness", "add", "came"),
    "counted": (stumbles, "readiness", "add", "came", True),
    "missed": (misses, 1, False),
    "missed, rank 0 late": (misses, 0, False),
    "missed, and late": (misses, 0, True),
    "missed first": (missed_first, 1),
    "missed first, rank 0 late": (missed_first, 0),
}


def scenes(me):
    begin(me)
    # Ours comes later.
    assert me.store.add("known", 0) == 0
    _others.update(sockets())
    found = {"at first": [asked("first", what="preprocess"), asked("first"), council.agreed(True)]}
    for name, (scene, *how) in SCENES.items():
        me.meet(name)
        found[name] = scene(me, name, *how)
    return found
