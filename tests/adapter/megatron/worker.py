"""One rank of the Megatron job of test_dist_checkpointing.py: many scenarios per launch, for one release."""

import os
import shutil
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pytorch")]


def main(what, base, durable):
    import faulthandler

    # Shortly before the launcher gives up: where each rank hangs goes to its log.
    faulthandler.dump_traceback_later(120, exit=True)

    import inspect
    import multiprocessing
    import re
    import warnings

    import cpu

    warnings.filterwarnings("ignore")
    cpu.install()
    import torch
    import torch.distributed as dist
    from launch import report, scenarios
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.core.dist_checkpointing.strategies import common as common_strategies
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from model import bits, build, differing, restore, sharded, train
    from torch import multiprocessing as torch_mp
    from torch.distributed.checkpoint.api import CheckpointException

    from mlflashpoint.adapter.megatron import MegatronStore
    from mlflashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
    from mlflashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
    from mlflashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
    from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
    from mlflashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
    from mlflashpoint.core.checkpoint_id_types import CheckpointContainerId
    from mlflashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
    from mlflashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
    from mlflashpoint.replication.replication_manager import ReplicationManager

    torch.set_num_threads(1)
    cpu.use_adam()
    # Megatron-Core's own saves to disk would start an interpreter for this, and import all anew.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    queue = AsyncCallsQueue()
    save_options = {"async_strategy": "mcore"}
    known = inspect.signature(dist_checkpointing.save).parameters
    save_options = {name: value for name, value in save_options.items() if name in known}

    scenario = scenarios(results)

    def failing(run):
        try:
            run()
        except CheckpointException as error:
            return {str(r): [type(e).__name__, str(e)] for r, (e, _) in error.failures.items()}
        except Exception as error:
            return {str(rank): [type(error).__name__, str(error)]}
        return {}

    def save_durably(state, step, kind):
        folder = Path(durable) / f"{kind}-{step}"
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(folder), **save_options)

    def load(model, optimizer, folder, kind, **options):
        loaded = dist_checkpointing.load(sharded(model, optimizer, 0, loading=True, kind=kind), str(folder), **options)
        restore(model, optimizer, loaded)
        return loaded

    # The guide's long form.
    base_container = CheckpointContainerId(f"{base}/guide")
    checkpoint_object_manager = CheckpointObjectManager()
    replication_manager = ReplicationManager()
    replication_manager.initialize(checkpoint_object_manager)
    memory_storage_writer = MemoryStorageWriter(
        checkpoint_saver=DefaultMLFlashpointCheckpointSaver(
            global_rank_getter=torch.distributed.get_rank,
            local_rank_getter=torch.distributed.get_node_local_rank,
            global_barrier_func=lambda: torch.distributed.barrier(),
            ckpt_obj_manager=checkpoint_object_manager,
            replication_manager=replication_manager,
            initial_buffer_size_bytes=1 << 20,
            use_optimized_save=True,
        ),
        mp_manager=torch_mp.Manager(),
    )
    megatron_save_strategy = MLFlashpointMegatronAsyncSaveStrategy(
        storage_writer=memory_storage_writer, use_cached_ckpt_structure=True
    )
    checkpoint_loader = DefaultMLFlashpointCheckpointLoader(
        checkpoint_object_manager=checkpoint_object_manager,
        replication_manager=replication_manager,
        global_rank_getter=dist.get_rank,
        local_rank_getter=torch.distributed.get_node_local_rank,
        broadcast_object_list_func=dist.broadcast_object_list,
        all_gather_object_func=dist.all_gather_object,
        world_size_getter=dist.get_world_size,
    )
    mlflashpoint_load_strategy = MLFlashpointMegatronLoadStrategy(
        replication_manager=replication_manager, checkpoint_loader=checkpoint_loader
    )
    load_options = {"sharded_strategy": mlflashpoint_load_strategy}
    if hasattr(common_strategies, "TorchCommonLoadStrategy"):
        load_options["common_strategy"] = common_strategies.TorchCommonLoadStrategy()

    def version(step):
        return CheckpointContainerId.create_child(base_container, CheckpointContainerId.format_version_container(step))

    def reloaded(kind, step, tp):
        """What memory and disk each give to a fresh model, and what they have in common."""
        latest = checkpoint_loader.get_latest_complete_checkpoint(base_container)
        model, optimizer = build(7, tp)
        loaded = load(model, optimizer, latest, kind, **load_options)
        from_memory = bits(model, optimizer)
        model, optimizer = build(8, tp)
        load(model, optimizer, Path(durable) / f"{kind}-{step}", kind)
        from_disk = bits(model, optimizer)
        fresh = bits(*build(7, tp))
        return {
            "latest": latest,
            "differing": differing(from_memory, from_disk),
            "changed": len(differing(from_memory, fresh)),
            "common": {name: loaded.get(name) for name in ("iteration", "args", "list", "content_metadata")},
        }

    if what == "save":

        @scenario
        def guide_async():
            model, optimizer = build(1, 2)
            train(model, optimizer, 3)
            save_durably(sharded(model, optimizer, 3), 3, "dp_reshardable")
            expected = bits(model, optimizer)
            async_request = save_local_aware_megatron_checkpoint(
                checkpoint=sharded(model, optimizer, 3),
                checkpoint_dir=str(version(3)),
                save_strategy=megatron_save_strategy,
                async_save=True,
            )
            queue.schedule_async_request(async_request)
            losses = train(model, optimizer, 2, seed=6)
            queue.maybe_finalize_async_calls(blocking=True)
            result = reloaded("dp_reshardable", 3, 2)
            model, optimizer = build(9, 2)
            load(model, optimizer, version(3), "dp_reshardable", **load_options)
            return {
                **result,
                "snapshot": differing(bits(model, optimizer), expected),
                "goes_on_equal": train(model, optimizer, 2, seed=6) == losses,
                "files": sorted(path.name for path in Path(version(3)).iterdir()),
            }

        @scenario
        def megatrons_own_save():
            model, optimizer = build(1, 2)
            train(model, optimizer, 4)
            save_durably(sharded(model, optimizer, 4), 4, "dp_reshardable")
            Path(version(4)).mkdir(exist_ok=True)
            options = {"content_metadata": {"kind": "x", "nothing": None}} if "content_metadata" in known else {}
            dist_checkpointing.save(
                sharded(model, optimizer, 4), str(version(4)), megatron_save_strategy, **save_options, **options
            )
            result = reloaded("dp_reshardable", 4, 2)
            stored = getattr(dist_checkpointing, "load_content_metadata", None)
            result["stored"] = stored(str(version(4))) if stored is not None else None
            return result

        @scenario
        def metadata_that_is_none():
            model, optimizer = build(1, 2)
            save_local_aware_megatron_checkpoint(
                sharded(model, optimizer, 5), str(version(5)), megatron_save_strategy, False, content_metadata=None
            )
            latest = checkpoint_loader.get_latest_complete_checkpoint(base_container)
            state = dist_checkpointing.load_common_state_dict(str(latest))
            keys = load_sharded_metadata(str(latest), mlflashpoint_load_strategy)
            shapes = dist_checkpointing.load_tensors_metadata(str(latest), mlflashpoint_load_strategy)
            word = shapes["embedding.word_embeddings.weight"]
            return {
                "has": "content_metadata" in state,
                "value": state.get("content_metadata", "missing"),
                "keys": len(keys),
                "tensors": len(shapes),
                "shape": list(word.global_shape),
            }

        @scenario
        def a_node_without_the_folder():
            latest = checkpoint_loader.get_latest_complete_checkpoint(base_container)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(latest)
            dist.barrier()
            again = checkpoint_loader.get_latest_complete_checkpoint(base_container)
            # Ranks of one node put the same folder back.
            dist.barrier()
            return {"files": sorted(path.name for path in Path(again).iterdir())}

        @scenario
        def an_object_that_nothing_can_serialise():
            model, optimizer = build(1, 2)
            state = sharded(model, optimizer, 6)
            from megatron.core.dist_checkpointing import ShardedObject

            bad = __import__("threading").Lock() if rank == 1 else 1
            state["bad"] = ShardedObject("bad", bad, (world_size,), (rank,))
            failures = failing(
                lambda: save_local_aware_megatron_checkpoint(state, str(version(6)), megatron_save_strategy, False)
            )
            return {"failures": failures}

        @scenario
        def a_full_store():
            model, optimizer = build(1, 2)
            state = sharded(model, optimizer, 7)
            from megatron.core.dist_checkpointing import ShardedTensor

            # Only rank 1 holds it, and there is no store that has room for it.
            huge = torch.empty(1, dtype=torch.uint8).expand(1 << 44) if rank == 1 else torch.empty(1, dtype=torch.uint8)
            if rank == 1:
                state["huge"] = ShardedTensor.from_rank_offsets("huge", huge)
            options = {"validate_access_integrity": False}
            request = save_local_aware_megatron_checkpoint(
                state, str(version(7)), megatron_save_strategy, True, **options
            )
            failures = failing(lambda: [finalize() for finalize in request.finalize_fns])
            return {
                "failures": failures,
                "latest": checkpoint_loader.get_latest_complete_checkpoint(base_container),
            }

        checkpoint_object_manager.close()

        @scenario
        def the_python_of_the_page():
            page = (HERE.parents[2] / "docs" / "megatron.md").read_text()
            short, long = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
            os.environ.update(MLFLASHPOINT_BASE_CONTAINER=f"{base}/page", MLFLASHPOINT_JOB_ID="page")
            model, optimizer = build(1, 2)
            train(model, optimizer, 1)
            names = {"sharded_state_dict": sharded(model, optimizer, 1), "step": 1}
            exec(short, names)
            store, fresh = names["store"], build(7, 2)
            restore(*fresh, names["state"])
            # The long form's names are those of this module.
            names = {
                "MLFlashpointMegatronAsyncSaveStrategy": MLFlashpointMegatronAsyncSaveStrategy,
                "save_local_aware_megatron_checkpoint": save_local_aware_megatron_checkpoint,
                "memory_storage_writer": store.writer,
                "state_dict": sharded(model, optimizer, 2),
                "version": store.version(2),
            }
            exec(long, names)
            names["request"].execute_sync()
            found = {"differing": differing(bits(*fresh), bits(model, optimizer)), "newest": store.latest()}
            store.close()
            return found

        store = MegatronStore.from_env(base_container=f"{base}/short", job_id="short")

        @scenario
        def fully_parallel_and_cached():
            """Saves by the short form through Megatron's wrapper; the third and later reuse the plan."""
            model, optimizer = build(1, 1)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            wrapper = FullyParallelSaveStrategyWrapper(store.save_strategy, group, True)
            planned = []
            planning = store.save_strategy._planning
            original = planning.plan

            def watched(*args, again, **options):
                planned.append(again)
                return original(*args, again=again, **options)

            planning.plan = watched
            for step in (1, 2, 3, 4):
                train(model, optimizer, 1, seed=step)
                store.save(
                    sharded(model, optimizer, step, kind="fully_reshardable"), step, async_save=False,
                    save_strategy=wrapper, content_metadata=None,
                )  # fmt: skip
            planning.plan = original
            expected = bits(model, optimizer)
            model, optimizer = build(2, 1)
            loaded = store.load(
                sharded(model, optimizer, 0, loading=True, kind="fully_reshardable"),
                store.latest(),
                sharded_strategy=FullyParallelLoadStrategyWrapper(store.load_strategy, group),
            )
            restore(model, optimizer, loaded)
            return {"planned": planned, "differing": differing(bits(model, optimizer), expected)}

        @scenario
        def a_structure_that_changes():
            """A tensor more on one rank: the cached plan is dropped by all."""
            from megatron.core.dist_checkpointing import ShardedTensor

            def state(step, width):
                data = torch.full((4, width), float(step * 10 + rank))
                return {"t": ShardedTensor.from_rank_offsets("t", data, (0, rank, world_size)), "iteration": step}

            for step in (10, 11, 12):
                store.save(state(step, 3), step, async_save=False)
            store.save(state(13, 5), 13, async_save=False)
            into = state(0, 5)
            del into["iteration"]
            loaded = store.load(into, store.latest())
            return {"t": loaded["t"][0].tolist(), "iteration": loaded["iteration"]}

        @scenario
        def two_groups_of_one_job():
            """Two groups save the same steps with other common states; then one of them saves on."""
            from megatron.core.dist_checkpointing import ShardedTensor

            def state(group, step):
                data = torch.full((2, 3), float(step + 100 * "ab".index(group)))
                tensor = ShardedTensor.from_rank_offsets("t", data, (0, rank, world_size))
                return {"t": tensor, "who": group, "iteration": step}

            def back(group, version):
                found = stores[group].load({"t": state(group, 0)["t"]}, version)
                return [found["who"], found["iteration"], found["t"][0].tolist()[0]]

            stores = {
                group: MegatronStore.from_env(base_container=f"{base}/groups", job_id="groups", group=group)
                for group in "ab"
            }
            for step in (1, 2, 3):
                for group, store in stores.items():
                    store.save(state(group, step), step, async_save=False)
            newest = {group: store.latest() for group, store in stores.items()}
            both = [back(group, version) for group, version in newest.items()]
            for step in (4, 5, 6):
                stores["b"].save(state("b", step), step, async_save=False)
            return {
                "newest": newest,
                "both": both,
                "kept": [back("a", stores["a"].version(step)) for step in (2, 3)],
                "last": back("b", stores["b"].latest()),
            }

        @scenario
        def the_last_version():
            model, optimizer = build(1, 2)
            train(model, optimizer, 2)
            for kind, step in (("dp_reshardable", 20), ("fully_reshardable", 30)):
                save_durably(sharded(model, optimizer, step, kind=kind), step, kind)
                target = MegatronStore.from_env(base_container=f"{base}/{kind}", job_id=kind)
                target.save(sharded(model, optimizer, step, kind=kind), step, async_save=False)
                target.runtime.flush()
            return {"saved": True}

        report(results)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def resharded(kind, step, tp, container=None):
        container = container or kind
        store = MegatronStore.from_env(base_container=f"{base}/{container}", job_id=container)
        latest = store.latest()
        model, optimizer = build(3, tp)
        loaded = store.load(sharded(model, optimizer, 0, loading=True, kind=kind), latest)
        restore(model, optimizer, loaded)
        from_memory = bits(model, optimizer)
        losses = train(model, optimizer, 1)
        model, optimizer = build(4, tp)
        load(model, optimizer, Path(durable) / f"{kind}-{step}", kind)
        result = {
            "latest": latest,
            "differing": differing(from_memory, bits(model, optimizer)),
            "goes_on_equal": train(model, optimizer, 1) == losses,
            "iteration": loaded["iteration"],
        }
        store.runtime.close()
        return result

    def from_four_ranks(name):
        """A container of its own for each job that goes on from what four ranks saved, so that none abandons it."""
        return resharded("fully_reshardable", 40, 1, container=f"four-{name}")

    if what == "fewer":

        @scenario
        def fewer_ranks_and_another_tensor_parallel_size():
            return from_four_ranks(world_size)

        @scenario
        def a_sharding_that_fewer_ranks_cant_load():
            return failing(lambda: resharded("dp_reshardable", 50, 1, container=f"fixed-{world_size}"))

        dist.barrier()
        os._exit(0)

    @scenario
    def more_data_parallel_ranks():
        return resharded("dp_reshardable", 20, 2)

    @scenario
    def another_tensor_parallel_size():
        return resharded("fully_reshardable", 30, 4 if world_size == 4 else 1)

    @scenario
    def what_cant_be_resharded():
        return failing(lambda: resharded("dp_reshardable", 20, 1))

    @scenario
    def four_ranks_save():
        model, optimizer = build(1, 2)
        train(model, optimizer, 2)
        for kind, step, containers in (
            ("fully_reshardable", 40, ("four-2", "four-3")),
            ("dp_reshardable", 50, ("fixed-2", "fixed-3")),
        ):
            save_durably(sharded(model, optimizer, step, kind=kind), step, kind)
            for container in containers:
                target = MegatronStore.from_env(base_container=f"{base}/{container}", job_id=container)
                target.save(sharded(model, optimizer, step, kind=kind), step, async_save=False)
                target.runtime.flush()
        return {"saved": True}

    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
