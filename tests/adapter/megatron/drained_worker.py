"""One rank of the job of test_drained.py: it is ended as a scheduler does it, or goes on from what is left."""

import hashlib
import os
import signal
import sys
import time

from ranks import begin


def main(what, base, durable):
    _, _, scenario, _ = begin()
    from model import bits, build, restore, sharded, train

    from mlflashpoint.adapter.megatron import MegatronStore

    store = MegatronStore.from_env(base_container=f"{base}/drained", job_id="drained", drain_dir=f"{durable}-drained")

    def trained_on(model, optimizer):
        """The losses of two more steps, and all that training depends on after them."""
        losses = train(model, optimizer, 2, seed=6)
        return {
            "losses": losses,
            "state": hashlib.sha256(repr(sorted(bits(model, optimizer).items())).encode()).hexdigest(),
        }

    if what == "terminate":

        @scenario
        def goes_on():
            model, optimizer = build(1, 2)
            for step in (1, 2):
                train(model, optimizer, 1, seed=step)
                store.save(sharded(model, optimizer, step), step).execute_sync()
            return {"step": 2, "common": [1, None, "x"], **trained_on(model, optimizer)}

        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    else:

        @scenario
        def goes_on():
            newest = store.latest()
            model, optimizer = build(9, 2)
            loaded = store.load(sharded(model, optimizer, 0, loading=True), newest)
            restore(model, optimizer, loaded)
            found = {"step": loaded["iteration"], "common": loaded["list"], **trained_on(model, optimizer)}
            # Memory is as good as ever.
            store.save(sharded(model, optimizer, 3), 3, async_save=False)
            store.runtime.flush()
            assert store.latest() == store.version(3)
            return found

        store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
