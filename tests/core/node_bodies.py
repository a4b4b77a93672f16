"""What the ranks of the tests with several nodes do; each body runs in a process of its own."""

import sys
import threading

from tests.core.bodies import resume, settle
from tests.core.ranks import state


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
