"""One rank of the job of test_megatron.py: Megatron-Core's ``dist_checkpointing`` on nodes, a real GPT.

Usage: megatron_ranks.py WHAT DURABLE
"""

import os
import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "adapter" / name) for name in ("megatron", "pytorch")]


def main(what, durable):
    import cpu

    warnings.filterwarnings("ignore")
    cpu.install()
    import torch
    import torch.distributed as dist
    from launch import killed, scenarios
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from model import bits, build, differing, restore, sharded, train

    from mlflashpoint.adapter.megatron import MegatronStore
    from mlflashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint

    torch.set_num_threads(1)
    cpu.use_adam()
    dist.init_process_group("gloo")
    scenario = scenarios({})
    kinds = {"dp_reshardable": 3, "fully_reshardable": 4}
    stores = {kind: MegatronStore.from_env(group=kind) for kind in kinds}

    if what == "save":

        @scenario
        def saved():
            queue, files = AsyncCallsQueue(), {}
            model, optimizer = build(1, 2)
            for kind, step in kinds.items():
                train(model, optimizer, 1, seed=step)
                folder = Path(durable) / kind
                folder.mkdir(parents=True, exist_ok=True)
                dist.barrier()
                dist_checkpointing.save(sharded(model, optimizer, step, kind=kind), str(folder), async_strategy="mcore")
                store = stores[kind]
                request = save_local_aware_megatron_checkpoint(
                    checkpoint=sharded(model, optimizer, step, kind=kind),
                    checkpoint_dir=str(store.version(step)),
                    save_strategy=store.save_strategy,
                    async_save=True,
                )
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
                files[kind] = sorted(path.name for path in Path(store.latest()).iterdir())
            return files

        killed()

    # Of a format that another number of ranks and another layout can load.
    for kind in kinds if dist.get_world_size() == 4 else ("fully_reshardable",):

        def loaded(kind=kind):
            store = stores[kind]
            latest = store.latest()
            tp = 2 if dist.get_world_size() == 4 else 1
            model, optimizer = build(7, tp)
            found = store.load(sharded(model, optimizer, 0, loading=True, kind=kind), latest)
            restore(model, optimizer, found)
            from_memory = bits(model, optimizer)
            losses = train(model, optimizer, 1)
            model, optimizer = build(8, tp)
            options = sharded(model, optimizer, 0, loading=True, kind=kind)
            restore(model, optimizer, dist_checkpointing.load(options, str(Path(durable) / kind)))
            return {
                "differing": differing(from_memory, bits(model, optimizer)),
                "compared": len(from_memory),
                "goes_on_equal": train(model, optimizer, 1) == losses,
                "common": [found["iteration"], found["args"], found["list"]],
                "files": sorted(path.name for path in Path(latest).iterdir()),
            }

        loaded.__name__ = kind
        scenario(loaded)

    for store in stores.values():
        store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
