"""What the ranks of the tests with several nodes do; each body runs in a process of its own."""

import contextlib
import functools
import hashlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from mlflashpoint.core import arena, lagfile, replicas
from mlflashpoint.core.onlooker import Onlooker
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.errors import FlashpointError
from mlflashpoint.replication import gloo_server, replicator
from mlflashpoint.settings import StoreConfig
from tests.core.bodies import die, find_only, resume, save_steps, settle
from tests.core.ranks import state
from tests.replication.peers import find_mooncake


def threads_after_a_save(me):
    """The threads and modules that a rank has while it trains."""
    runtime = me.runtime()
    resume(me, runtime)
    assert runtime.save(state(1, me.rank), step=1).ok
    runtime.flush()
    settle(runtime, 1)
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("mlflashpoint"))
    me.meet("looked")
    runtime.close()
    return {"threads": names, "modules": sorted(sys.modules), "stats": runtime.stats(), "logs": me.logs}


def resume_and_flush(me):
    """Resume, save nothing, and end when everybody has finished what the resume began."""
    runtime = me.runtime()
    step = resume(me, runtime)
    assert runtime.flush()
    me.meet("flushed")
    runtime.close()
    return {"found": step, "stats": runtime.stats(), "logs": me.logs}


def save_back_to_back(me, rounds):
    """Resume, and save without a pause, in step with the others; then let it all become complete."""
    runtime = me.runtime()
    first = resume(me, runtime)
    results = []
    for step in range(first + 1, first + 1 + rounds):
        me.meet(f"step-{step}")
        results.append(runtime.save(state(step, me.rank), step=step))
    assert runtime.flush()
    me.meet("flushed")
    settle(runtime, first + rounds)
    runtime.close()
    skipped = [result.skipped for result in results]
    return {"found": first, "skipped": skipped, "last": first + rounds, "stats": runtime.stats(), "logs": me.logs}


def save_with(me, odd, environ=None, host=None, settings=None):
    """Save three steps; rank ``odd`` has another environment, host name or settings."""
    if me.rank == odd:
        os.environ.update(environ or {})
        if host is not None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
            socket.gethostname = lambda: host
    runtime = me.runtime(**((settings or {}) if me.rank == odd else {}))
    resume(me, runtime)
    oks = []
    for step in (1, 2, 3):
        oks.append(runtime.save(state(step, me.rank), step=step).ok)
        me.meet(f"saved-{step}")
    flushed = runtime.flush()
    me.meet("flushed")
    settle(runtime, 3) if runtime.stats()["versions_complete"] else None
    me.meet("settled")
    runtime.close()
    return {"oks": oks, "flushed": flushed, "stats": runtime.stats(), "logs": me.logs}


def hold_slowly(me, slow, seconds):
    """Rank ``slow`` takes long to check what it receives; what the others say of their lag meanwhile is noted."""
    if me.rank == slow:
        commit = replicas.Replicas.commit
        replicas.Replicas.commit = lambda *args: (time.sleep(seconds), commit(*args))[1]
    runtime = me.runtime()
    resume(me, runtime)
    results, lags, told, complete = [], [], [], []
    for step in range(1, 6):
        me.meet(f"step-{step}")
        results.append(runtime.save(state(step, me.rank), step=step))
        time.sleep(0.2)
        lags.append(runtime.stats()["replica_age_s"])
        complete.append(runtime.stats()["last_complete_step"])
        told.append(lagfile.SeatLag.read(me.base / "default" / f"seat-{me.local_rank}"))
    runtime.flush()
    me.meet("end")
    final = runtime.save(state(100, me.rank), step=100)
    runtime.flush()
    settle(runtime, 100)
    runtime.close()
    return {
        "ok": [result.ok for result in results],
        "skipped": [result.skipped for result in results],
        "blocking": [result.blocking_s for result in results],
        "lags": lags,
        "complete": complete,
        "on_their_way": [lag is not None and lag.since_s > 0 for lag in told],
        "final": final.ok,
        "stats": runtime.stats(),
    }


def find_while_one_hands_out_nothing(me, stuck):
    """Rank ``stuck`` never answers who wants to fetch from it."""
    if me.rank == stuck:
        gloo_server._hand_out = lambda *args: time.sleep(30)
    else:
        # So that it is the stuck one that is asked first.
        describe = gloo_server._describe
        gloo_server._describe = lambda *args: (time.sleep(0.5), describe(*args))[1]
    runtime = me.runtime()
    started = time.monotonic()
    recovery = runtime.find_latest()
    took = time.monotonic() - started
    step = -1 if recovery is None else recovery.step
    value = None if recovery is None else float(runtime.load(recovery).state["w"][0])
    me.meet("found")
    runtime.close()
    return {"found": step, "value": value, "took": took, "logs": me.logs}


def save_in_racks(me, racks, steps):
    """As ``save_steps``, with a failure domain for each rank's node."""
    me.settings["failure_domain"] = racks[me.rank]
    return save_steps(me, steps)


def resume_and_save(me, steps, numbers=1000):
    """Resume, and save the steps, each as far as it gets before the next."""
    runtime = me.runtime()
    found = resume(me, runtime)
    oks = []
    for step in steps:
        oks.append(runtime.save(state(step, me.rank, numbers), step=step).ok)
        runtime.flush()
        me.meet(f"saved-{step}")
    runtime.close()
    return {"found": found, "oks": oks, "stats": runtime.stats(), "logs": me.logs}


def refuse_replicas(me, full):
    """Rank ``full`` has no more memory than its own slots take."""
    runtime = me.runtime()
    resume(me, runtime)
    if me.rank == full:
        own = arena.free_bytes
        arena.free_bytes = lambda folder: 0 if "receive" in threading.current_thread().name else own(folder)
    oks = []
    for step in (1, 2, 3):
        oks.append(runtime.save(state(step, me.rank), step=step).ok)
        runtime.flush()
        me.meet(f"saved-{step}")
    runtime.close()
    return {"oks": oks, "stats": runtime.stats(), "logs": me.logs}


def find_while_one_dies(me, victim):
    """Rank ``victim`` dies when somebody begins to fetch from it."""
    if me.rank == victim:
        gloo_server._hand_out = die
    return find_only(me)


def find_from_two_at_once(me, lost):
    """Rank ``lost`` asks for small ranges; each of the others hands out its first when both have been asked."""
    asked = []
    if me.rank == lost:
        replicator.gather = functools.partial(replicator.gather, range_bytes=1000)
    else:
        hand_out = gloo_server._hand_out

        def together(*args):
            if not asked:
                asked.append(True)
                me.meet_some("handing out", 2)
            hand_out(*args)

        gloo_server._hand_out = together
    found = find_and_load(me)
    return {**found, "asked": bool(asked)}


def find_and_load(me):
    """The step that is found, and a number of it."""
    runtime = me.runtime()
    recovery = runtime.find_latest()
    value = float(runtime.load(recovery).state["w"][0])
    me.meet("loaded")
    runtime.close()
    return {"found": recovery.step, "value": value}


def listening():
    """Addresses that this process listens on."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = []
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].rsplit(":", 1)[0])
    return found


def listen_while_saving(me):
    """What each rank listens on without us, while saves are replicated, and at the end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = me.store
    group = dist.ProcessGroupGloo(dist.PrefixStore("job", store), me.rank, me.world)
    group.barrier().wait()
    before = listening()
    runtime = me.runtime()
    resume(me, runtime)
    for step in (1, 2):
        assert runtime.save(state(step, me.rank), step=step).ok
        runtime.flush()
        settle(runtime, step)
    during = listening()
    me.meet("looked")
    runtime.close()
    give_up = time.monotonic() + 5
    while len(listening()) > len(before) and time.monotonic() < give_up:
        time.sleep(0.01)
    return {"before": before, "during": during, "after": listening(), "stats": runtime.stats()}


def save_over_mooncake(me, steps):
    """As ``save_steps``, or as ``resume_and_flush`` for none, and which of the transports' modules that has brought."""
    missing = find_mooncake()
    assert not missing, missing
    saved = save_steps(me, steps) if steps else resume_and_flush(me)
    return {**saved, "modules": [name for name in sys.modules if name.startswith("mlflashpoint.replication.")]}


def save_without_the_engine(me):
    """Save three steps where the Mooncake engine is not installed."""
    sys.modules["mooncake"] = None
    return save_with(me, -1)


def onlooker_of(me, **settings):
    """One beside the store of this process, as if another process had that."""
    config = StoreConfig(job_id="job", base_container=me.base, **{"deadline_s": 20, **me.settings, **settings})
    return Onlooker(config, Ranks(me.rank, me.world, me.local_rank), "default", me.store)


def seen(me, onlooker):
    """Step of what is found, a number of every rank's shard, and what can't be read."""
    recovery = onlooker.find_latest(reshard=True)
    return None if recovery is None else [recovery.step, values_of(me, onlooker, recovery)]


def values_of(me, onlooker, recovery):
    values = []
    for rank in range(me.world):
        try:
            with onlooker.load_shard(recovery, rank) as reader:
                values.append(float(reader.state()["w"][0]))
        except FlashpointError as error:
            values.append(type(error).__name__)
    return values


def files_in(base):
    """What lies in a container, but for the locks, which tell who holds them."""
    files = (file for file in base.rglob("*") if file.is_file() and file.name not in ("lock", "replication.json"))
    return sorted((str(file.relative_to(base)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)


def look_on(me):
    """Look before there is anything, beside a store that saves, at what is damaged, and at what is overwritten."""
    onlooker = onlooker_of(me)
    found = {"nothing": seen(me, onlooker)}
    runtime = me.runtime()
    resume(me, runtime)
    for step in (1, 2):
        assert runtime.save(state(step, me.rank), step=step).ok
        runtime.flush()
        settle(runtime, step)
    me.meet("settled")
    before = files_in(me.base)
    found["whole"] = seen(me, onlooker)
    me.meet("read")
    found["untouched"] = files_in(me.base) == before
    for seat in me.base.glob("*/seat-*"):
        for slot in arena.scan_seat(seat):
            if (slot.record.rank, slot.record.step) == (1, 2):
                with open(f"{slot.path}.data", "r+b") as data:
                    data.write(b"damaged")
    me.meet("damaged")
    found["damaged"] = seen(me, onlooker)
    found["quarantined"] = [file.name for file in me.base.rglob("*.quarantined")]
    me.meet("looked")
    recovery = onlooker.find_latest(reshard=True)
    for step in (3, 4):
        assert runtime.save(state(step, me.rank), step=step).ok
        runtime.flush()
        settle(runtime, step)
    me.meet("overwritten")
    found["overwritten"] = values_of(me, onlooker, recovery)
    me.meet("tried")
    found["afterwards"] = seen(me, onlooker)
    recovery = onlooker.find_latest(reshard=True)
    for _ in range(2):
        onlooker.save_begins()
    me.meet("saves have begun")
    found["rested"] = values_of(me, onlooker, recovery)
    me.meet("end")
    onlooker.close()
    runtime.close()
    return {**found, "logs": me.logs}


def look_on_in_vain(me, deadline_s):
    """Look while a rank does not."""
    started = time.monotonic()
    try:
        found = seen(me, onlooker_of(me, deadline_s=deadline_s))
    except FlashpointError as error:
        found = f"{type(error).__name__}: {error}"
    return {"found": found, "took": time.monotonic() - started}
