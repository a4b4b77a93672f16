"""What the ranks of the multi-process tests do; each body runs in a process of its own."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from mlflashpoint.core import arena, saver
from mlflashpoint.core.ledger import Ledger
from mlflashpoint.core.node_versions import _common
from mlflashpoint.core.onlooker import Onlooker
from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.core.slotwait import SlotWait
from mlflashpoint.errors import FlashpointError
from tests.core.ranks import state


def save_steps(me, steps, resumed=None, *, whole=True, **options):
    """Find, load if there is something, say so, and save ``steps``, each complete before the next."""
    runtime = me.runtime()
    found = resume(me, runtime, resumed)
    results = []
    for step in steps:
        results.append(runtime.save(state(step, me.rank), step=step, **options).ok)
        runtime.flush()
        me.meet(f"saved-{step}")
    if steps and whole:
        settle(runtime, steps[-1])
    runtime.close()
    return {"found": found, "saved": results, "stats": runtime.stats(), "logs": me.logs}


def save_without_a_word(me, steps):
    """Look, and save, and say nowhere from where training goes on."""
    runtime = me.runtime()
    recovery = runtime.find_latest()
    saved = [runtime.save(state(step, me.rank), step=step).ok for step in steps]
    runtime.flush()
    runtime.close()
    return {"found": None if recovery is None else recovery.step, "saved": saved}


def await_drain_look():
    """Wait for the look at the drain directory that a start takes in the background."""
    for thread in threading.enumerate():
        if thread.name == "mlflashpoint-drain-look":
            thread.join(30)
            assert not thread.is_alive()


def look_at_drain_dir(me):
    """Start, and no more; tells what was logged."""
    runtime = me.runtime()
    runtime.find_latest()
    await_drain_look()
    runtime.close()
    return me.logs


def settle(runtime, step):
    """Wait a while for the verdict on ``step``: another rank may have been the last to commit."""
    give_up = time.monotonic() + 10
    while runtime.stats()["last_complete_step"] < step and time.monotonic() < give_up:
        time.sleep(0.01)


def resume(me, runtime, resumed=None):
    """Step that was found and loaded, -1 for none; its content is checked."""
    recovery = runtime.find_latest()
    if recovery is None:
        runtime.resumed(-1 if resumed is None else resumed)
        return -1
    loaded = runtime.load(recovery)
    assert set(loaded.state["w"].tolist()) == {recovery.step * 100.0 + me.rank}
    assert (loaded.state["step"], loaded.state["nested"][0]) == (recovery.step, me.rank)
    runtime.resumed(loaded.step if resumed is None else resumed)
    return loaded.step


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


#: phase of a save -> how to die there
PHASES = {
    "before the slot is invalidated": (arena.Slot, "invalidate", "before"),
    "before the bytes are copied": (arena.Slot, "invalidate", "after"),
    "after the bytes are copied": (saver.ShardSaver, "_copy", "after"),
    "before the index is written": (saver, "commit_files", "before"),
    "between index and commit record": (saver, "replace_file", "second"),
    "after the commit record": (saver, "commit_files", "after"),
    "after the announcement": (Ledger, "commit", "after"),
}


def die_at(phase):
    owner, name, when = PHASES[phase]
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if when == "before" or (when == "second" and len(calls) == 2):
            die()
        result = original(*args, **kwargs)
        if when == "after":
            die()
        return result

    setattr(owner, name, wrapped)


def die_in_save(me, phase, victim):
    """Save 1 and 2, complete; then the victim dies in a phase of save 3 and the others finish theirs."""
    runtime = me.runtime()
    resume(me, runtime)
    for step in (1, 2):
        assert runtime.save(state(step, me.rank), step=step).ok
        runtime.flush()
        me.meet(f"saved-{step}")
    if me.rank == victim:
        die_at(phase)
    result = runtime.save(state(3, me.rank), step=3)
    assert runtime.flush()
    if me.rank == victim:
        time.sleep(60)
    return result.ok


def find_only(me, **wish):
    """Only look; tells what was found, or the error, and how long it took."""
    runtime = me.runtime()
    started = time.monotonic()
    try:
        recovery = runtime.find_latest(**wish)
        error = None
    except FlashpointError as raised:
        recovery, error = None, f"{type(raised).__name__}: {raised}"
    took = time.monotonic() - started
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("mlflashpoint")]
    step = None if recovery is None else recovery.step
    return {"step": step, "error": error, "took": took, "threads": threads, "logs": me.logs}


def train_beside_a_full_store(me, full):
    """Rank ``full`` has a store of 8 MiB; all train with a collective per step, and save each step."""
    runtime = me.runtime()
    found = resume(me, runtime)
    store, losses, blocking, errors, oks = me.store, [], [], [], []
    for step in range(1, 6):
        store.add(f"loss/{found}/{step}", step * (me.rank + 1))
        me.meet(f"step-{found}-{step}")
        losses.append(store.add(f"loss/{found}/{step}", 0))
        result = runtime.save({"w": torch.zeros(16 << 20, dtype=torch.uint8)}, step=step)
        oks.append(result.ok)
        blocking.append(result.blocking_s)
        errors.append(None if result.error is None else f"{type(result.error).__name__}: {result.error}")
    runtime.flush()
    me.meet("done")
    runtime.close()
    return {
        "losses": losses,
        "oks": oks,
        "blocking": blocking,
        "errors": errors,
        "stats": runtime.stats(),
        "logs": me.logs,
    }


def fail_one_save(me):
    """Rank 1's state of step 2 holds what can't be stored; the other steps are fine."""
    runtime = me.runtime()
    resume(me, runtime)
    oks = []
    for step in range(1, 6):
        content = state(step, me.rank)
        if me.rank == 1 and step in (2, 3):
            content["odd"] = object()
        oks.append(runtime.save(content, step=step).ok)
        runtime.flush()
        me.meet(f"saved-{step}")
    settle(runtime, 5)
    runtime.close()
    return {"oks": oks, "stats": runtime.stats(), "logs": me.logs}


def commit_slowly(me, slow, seconds):
    """The slow rank's background takes long per commit; nobody may wait much longer than busy_wait_s for it."""
    runtime = me.runtime()
    resume(me, runtime)
    if me.rank == slow:
        original = saver.ShardSaver.commit

        def commit(*args, **kwargs):
            time.sleep(seconds)
            return original(*args, **kwargs)

        saver.ShardSaver.commit = commit
    results = []
    for step in range(1, 8):
        me.meet(f"step-{step}")
        results.append(runtime.save(state(step, me.rank), step=step))
        time.sleep(0.05)
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
        "final": final.ok,
        "stats": runtime.stats(),
    }


def miss_one_save(me, misser, told=False):
    """The misser's adapter fails before it ever calls save for step 2; ``told``: and tells so."""
    runtime = me.runtime()
    resume(me, runtime)
    oks = []
    for step in range(1, 7):
        me.meet(f"step-{step}")
        if me.rank == misser and step == 2:
            if told:
                runtime.save_failed(step, ValueError("nothing to save"))
        else:
            oks.append(runtime.save(state(step, me.rank), step=step).ok)
        runtime.flush()
    settle(runtime, 6)
    runtime.close()
    return {"oks": oks, "stats": runtime.stats(), "logs": me.logs}


def roll_back_in_process(me):
    runtime = me.runtime()
    resume(me, runtime)
    for step in (10, 20, 30):
        runtime.save(state(step, me.rank), step=step, wait=True)
        settle(runtime, step)
        me.meet(f"a-{step}")
    runtime.resumed(20)
    runtime.save(state(25, me.rank), step=25, wait=True)
    me.meet("b-25")
    number = runtime.stats()
    return {"stats": number, "logs": me.logs}


def vote(me, votes_by_round):
    """Vote in several rounds, each with a key of its own; None is not voting at all."""
    runtime = me.runtime()
    answers = []
    for number, votes in enumerate(votes_by_round):
        me.meet(f"round-{number}")
        started = time.monotonic()
        mine = votes[me.rank]
        answers.append(None if mine is None else runtime.agree(f"durable-{number}", mine))
        assert time.monotonic() - started < 15
        me.meet(f"voted-{number}")
    return answers


def reshard(me):
    """Look for a version of another world size: refused plainly, then read shard by shard."""
    runtime = me.runtime()
    plain = runtime.find_latest()
    recovery = runtime.find_latest(reshard=True)
    try:
        runtime.load(recovery)
        error = None
    except FlashpointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    values = []
    for rank in range(recovery.world_size):
        with runtime.load_shard(recovery, rank) as reader:
            values.append(float(reader.tensor("w")[0]))
    runtime.resumed(recovery.step)
    ok = runtime.save(state(recovery.step + 1, me.rank), step=recovery.step + 1, wait=True).ok
    me.meet("saved")
    runtime.close()
    return {"plain": plain, "step": recovery.step, "error": error, "values": values, "ok": ok, "logs": me.logs}


def save_with_jitter(me, rounds):
    """The first saves come back to back, the ranks out of step with each other."""
    runtime = me.runtime()
    time.sleep(0.15 * me.rank)
    oks = []
    for step in range(1, rounds + 1):
        oks.append(runtime.save(state(step, me.rank), step=step).ok)
        time.sleep(0.03 * ((me.rank + step) % 2))
    runtime.flush()
    settle(runtime, rounds)
    runtime.close()
    return {"oks": oks, "stats": runtime.stats()}


def save_until_killed(me):
    """Resume and save in step with the others, for ever; the store's ``done`` counts the saves of all ranks."""
    runtime = me.runtime()
    step = resume(me, runtime)
    me.store.set(f"found/{me.rank}", str(step))
    while True:
        step += 1
        me.meet(f"step-{step}")
        assert runtime.save(state(step, me.rank, 200_000), step=step).ok
        me.store.add("done", 1)


def seen_on_node(me, steps, late_s=0.0):
    """What all processes agree on that see versions of ``steps`` on their nodes; rank 1 comes later."""
    store = dist.PrefixStore("default_pg", me.store)
    dist.init_process_group("fake", store=store, rank=me.rank, world_size=me.world)
    if me.rank == 1:
        time.sleep(late_s)
    found = _common("default", [VersionKey(1, "run", step, 2, "") for step in steps], None)
    return None if found is None else found.step


def keys_after(me, what, calls):
    """How many more keys are in the job's store after so many calls than after half of them."""
    for name in ("called-1", "counted-1", "called-2", "counted-2"):
        # The test's own keys are there from the start.
        me.store.add(f"meet/{name}", 0)
    store = dist.PrefixStore("default_pg", me.store)
    dist.init_process_group("fake", store=store, rank=me.rank, world_size=me.world)
    finder = runtime = me.runtime() if what != "newest_on_nodes" else None
    if runtime is not None:
        runtime.save(state(1, me.rank), step=1)
        # A call after which there is nothing left to do in the background.
        runtime.flush()
        runtime.await_version(1)
    if what == "onlooker":
        finder = Onlooker(runtime.config, Ranks(me.rank, me.world, me.local_rank), "default", me.store)

    def call():
        if finder is not None:
            assert finder.find_latest().step == 1
        else:
            assert _common("default", [VersionKey(1, "run", 7, 2, "")], None).step == 7

    found = []
    for number in (1, 2):
        for _ in range(calls // 2):
            call()
        me.meet(f"called-{number}")
        # What is deleted is so in the background.
        before = -1
        while before != me.store.num_keys():
            before = me.store.num_keys()
            time.sleep(0.5)
        found.append(me.store.num_keys())
        me.meet(f"counted-{number}")
    return found[1] - found[0]


def two_containers(me, rounds):
    """Two stores of one group, in two containers, which the ranks join at the same time and in different order."""
    wrong = []
    for number in range(rounds):
        stores = {name: me.runtime(base_container=me.base / f"{name}-{number}") for name in ("one", "two")}
        me.meet(f"opened-{number}")

        def use(name, stores=stores, number=number):
            step = 1 if name == "one" else 2
            try:
                stores[name].save(state(step, me.rank), step=step)
                stores[name].flush()
                found = stores[name].find_latest()
                if found is None or found.step != step:
                    wrong.append(f"round {number}, store {name}: found {found}")
            except FlashpointError as error:
                wrong.append(f"round {number}, store {name}: {error}")

        order = ["one", "two"] if me.rank % 2 == 0 else ["two", "one"]
        threads = [threading.Thread(target=use, args=(name,)) for name in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        me.meet(f"used-{number}")
        for store in stores.values():
            store.close()
    return wrong


def save_beside_a_pinned_rank(me, pinned, until, rounds, release=False):
    """Rank ``pinned`` has two slots, and its commit of step 2 takes until it has saved ``until``; others have three.

    With ``release`` that commit is over when the other ranks wait with the save of step 3.
    """
    if me.rank == pinned:
        hold, original = threading.Event(), saver.ShardSaver.commit

        def commit(self, staged, *, step, **fields):
            if step == 2:
                assert hold.wait(30)
            return original(self, staged, step=step, **fields)

        saver.ShardSaver.commit = commit
    runtime = me.runtime(keep_versions=2 if me.rank == pinned else 3)
    resume(me, runtime)
    results = []
    for step in range(1, rounds + 1):
        me.meet(f"step-{step}")
        if step == 3 and release:
            awaited = threading.Event()
            original_wait = SlotWait._wait

            def wait(self, ticket, awaited=awaited, original_wait=original_wait):
                awaited.set()
                return original_wait(self, ticket)

            SlotWait._wait = wait

            def let_go(awaited=awaited):
                assert awaited.wait(30)
                me.meet("all wait")
                if me.rank == pinned:
                    hold.set()

            threading.Thread(target=let_go).start()
        results.append(runtime.save(state(step, me.rank), step=step))
        if step == 1:
            settle(runtime, 1)
        me.meet(f"saved-{step}")
        if step == until and me.rank == pinned:
            hold.set()
        if step >= until:
            assert runtime.flush()
            settle(runtime, 2 if step == until else step)
    runtime.close()
    return {
        "skipped": [result.step for result in results if result.skipped],
        "errors": [str(result.error) for result in results if result.error],
        "blocking": [result.blocking_s for result in results],
        "stats": runtime.stats(),
        "logs": me.logs,
    }


def save_without_pause(me):
    """Save one version after the other, but not while the store has ``pause``, until it has ``stop``."""
    runtime = me.runtime()
    step = resume(me, runtime)
    while True:
        if me.rank == 0:
            while me.store.check(["pause"]) and not me.store.check(["stop"]):
                me.store.set("paused", "1")
                time.sleep(0.005)
            if me.store.check(["stop"]):
                me.store.set("over", "1")
        step += 1
        me.meet(f"step-{step}")
        if me.store.check(["over"]):
            break
        runtime.save(state(step, me.rank), step=step, wait=True)
    runtime.close()
    return step
