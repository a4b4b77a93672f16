"""One rank of the job of test_forms.py: every form of an async save, then a kill, then a fresh process that loads."""

import hashlib
import inspect
import os
import signal
import sys
from pathlib import Path

from ranks import begin


def main(what, base, durable):
    rank, _, scenario, results = begin()
    import torch
    import torch.distributed as dist
    from launch import report
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from model import bits, build, restore, sharded, train

    from mlflashpoint.adapter.megatron import MegatronStore

    kind = "fully_reshardable"

    def digest(model, optimizer):
        return hashlib.sha256(repr(sorted(bits(model, optimizer).items())).encode()).hexdigest()

    def opened(name):
        return MegatronStore.from_env(base_container=f"{base}/forms-{name}", job_id=name)

    known = inspect.signature(dist_checkpointing.save).parameters
    by_mcore = {"async_strategy": "mcore"} if "async_strategy" in known else {}

    def stir(model, optimizer):
        """What training does to the state, for less: every weight and every state of the optimizer changes."""
        with torch.no_grad():
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                for params in part.optimizer.param_groups:
                    for parameter in params["params"]:
                        parameter.add_(0.5)
                        for value in part.optimizer.state[parameter].values():
                            value.add_(0.25)
            for parameter in model.module.parameters():
                parameter.add_(1.0)

    def saves():
        model, optimizer = build(1, 1)
        train(model, optimizer, 1)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)

        def saved(name, save, queue, *, steps=1):
            """Save by ``save(store, state, step)`` while training goes on, and let the queue finalize each request."""
            store = opened(name)
            expected = ""
            for step in range(1, steps + 1):
                stir(model, optimizer)
                expected = digest(model, optimizer)
                request = save(store, sharded(model, optimizer, step, kind=kind), step)
                if queue is not None:
                    queue.schedule_async_request(request)
                stir(model, optimizer)
                before = Path(store.version(step), "metadata.json").exists()
                if queue is None:
                    request.execute_sync()
                else:
                    queue.maybe_finalize_async_calls(blocking=True)
            store.runtime.flush()
            return {"digest": expected, "step": steps, "early": before, "kind": type(request).__module__}

        def directly(strategy=None, **options):
            def save(store, state, step):
                Path(store.version(step)).mkdir(exist_ok=True)
                dist.barrier()
                chosen = store.save_strategy if strategy is None else strategy(store)
                return dist_checkpointing.save(
                    state, str(store.version(step)), chosen, async_sharded_save=True, **(options or by_mcore)
                )

            return save

        def shortly(strategy=None, **options):
            def save(store, state, step):
                chosen = {} if strategy is None else {"save_strategy": strategy(store)}
                return store.save(state, step, **chosen, **options)

            return save

        wrappers = {}

        def wrapped(store):
            if store not in wrappers:
                wrappers[store] = FullyParallelSaveStrategyWrapper(store.save_strategy, group, True)
            return wrappers[store]

        queue = AsyncCallsQueue()

        @scenario
        def direct():
            return saved("direct", directly(), queue)

        @scenario
        def direct_wrapped_cached():
            return saved("direct_wrapped_cached", directly(wrapped), queue, steps=3)

        @scenario
        def short():
            return saved("short", shortly(), queue)

        @scenario
        def short_at_once():
            return saved("short_at_once", shortly(), None)

        @scenario
        def short_wrapped_cached():
            return saved("short_wrapped_cached", shortly(wrapped), queue, steps=3)

        if hasattr(AsyncCallsQueue, "warmup_persistent_caller"):
            # Earlier releases know no other way than to start an interpreter, which would look for a GPU.
            AsyncCallsQueue.warmup_persistent_caller(rank, mp_mode="fork")

            @scenario
            def persistent():
                return saved("persistent", shortly(), AsyncCallsQueue(persistent=True), steps=2)

        if by_mcore:
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue as NvrxQueue

            nvrx = NvrxQueue(persistent=False)

            @scenario
            def nvrx_direct():
                return saved("nvrx_direct", directly(async_strategy="nvrx"), nvrx)

            @scenario
            def nvrx_direct_wrapped_cached():
                save = directly(wrapped, async_strategy="nvrx")
                return saved("nvrx_direct_wrapped_cached", save, nvrx, steps=3)

            @scenario
            def nvrx_short_at_once():
                return saved("nvrx_short_at_once", shortly(async_strategy="nvrx"), None)

    def loads():
        model, optimizer = build(2, 1)

        def load(name):
            def run():
                store = opened(name)
                latest = store.latest()
                loaded = store.load(sharded(model, optimizer, 0, loading=True, kind=kind), latest)
                restore(model, optimizer, loaded)
                common = [loaded["iteration"], loaded["list"]]
                return {"digest": digest(model, optimizer), "latest": Path(latest).name, "common": common}

            run.__name__ = name
            return run

        for path in sorted(Path(base).glob("forms-*")):
            scenario(load(path.name.removeprefix("forms-")))

    saves() if what == "save" else loads()
    report(results)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
