"""One rank of the job that test_flows.py starts: every flow in one launch, each with its result in the report."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(base, durable):
    import io
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import scenarios
    from states import blank, differing, full_state, leaves
    from torch import multiprocessing as torch_mp
    from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    from mlflashpoint.adapter.pytorch import MemoryStore
    from mlflashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
    from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
    from mlflashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
    from mlflashpoint.core.checkpoint_id_types import CheckpointContainerId
    from mlflashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
    from mlflashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
    from mlflashpoint.errors import StoreInUseError
    from mlflashpoint.replication.replication_manager import ReplicationManager

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}

    scenario = scenarios(results)

    def named(error):
        """Type and text of what each rank raised, as a CheckpointException tells it on this rank."""
        if isinstance(error, CheckpointException):
            return {str(r): [type(e).__name__, str(e)] for r, (e, _) in error.failures.items()}
        return {str(rank): [type(error).__name__, str(error)]}

    def failing(run):
        began = time.monotonic()
        try:
            run()
        except (Exception, CheckpointException) as error:
            return {"failures": named(error), "seconds": time.monotonic() - began}
        return {"failures": {}, "seconds": time.monotonic() - began}

    # --- the guide's long form -------------------------------------------------------------------------------------
    def long_form(**options):
        """The guide's objects, with its optional arguments: stores, writer and loader."""
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
                **options,
            ),
            mp_manager=torch_mp.Manager(),
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
        return checkpoint_object_manager, memory_storage_writer, checkpoint_loader

    def version(step, container="guide"):
        base_container = CheckpointContainerId(f"{base}/{container}")
        return CheckpointContainerId.create_child(base_container, CheckpointContainerId.format_version_container(step))

    base_container = CheckpointContainerId(f"{base}/guide")
    # Far less than the state needs: what a store takes does not depend on it.
    checkpoint_object_manager, memory_storage_writer, checkpoint_loader = long_form(
        initial_buffer_size_bytes=1024, use_optimized_save=False
    )

    def load(step_found):
        into = blank()
        dcp.load(
            into,
            checkpoint_id=str(step_found),
            storage_reader=MemoryStorageReader(path=step_found, checkpoint_loader=checkpoint_loader),
        )
        return into

    @scenario
    def nothing_saved_yet():
        return {"latest": checkpoint_loader.get_latest_complete_checkpoint(base_container)}

    @scenario
    def guide_sync_save():
        state = full_state(3)
        metadata = dcp.save(state, checkpoint_id=str(version(3)), storage_writer=memory_storage_writer)
        latest = checkpoint_loader.get_latest_complete_checkpoint(base_container)
        return {
            "latest": latest,
            "differing": differing(load(latest), state),
            "metadata": type(metadata).__name__,
            "keys": len(metadata.state_dict_metadata),
        }

    @scenario
    def tensors_changed_right_after_the_save():
        state, expected = full_state(4), full_state(4)
        dcp.save(state, checkpoint_id=str(version(4)), storage_writer=memory_storage_writer)
        for _, leaf in leaves(state):
            if isinstance(leaf, torch.Tensor):
                (leaf.to_local() if hasattr(leaf, "to_local") else leaf).detach().zero_()
        return {
            "differing": differing(load(checkpoint_loader.get_latest_complete_checkpoint(base_container)), expected)
        }

    @scenario
    def async_save_with_a_thread():
        state, expected = full_state(5), full_state(5)
        future = dcp.async_save(state, checkpoint_id=str(version(5)), storage_writer=memory_storage_writer)
        for _, leaf in leaves(state):
            if isinstance(leaf, torch.Tensor):
                (leaf.to_local() if hasattr(leaf, "to_local") else leaf).detach().zero_()
        future.result()
        latest = checkpoint_loader.get_latest_complete_checkpoint(base_container)
        return {"latest": latest, "differing": differing(load(latest), expected)}

    @scenario
    def the_version_before_is_still_there():
        return {"differing": differing(load(version(4)), full_state(4))}

    @scenario
    def an_unknown_version():
        return failing(lambda: load(version(77)))

    @scenario
    def a_folder_that_holds_no_store():
        elsewhere = CheckpointContainerId(f"{durable}/step-1_ckpt")
        return failing(lambda: load(elsewhere))

    @scenario
    def a_name_that_is_no_version():
        bad = f"{base_container}/step-7_ckpt_backup"
        save = lambda: dcp.save({"a": torch.ones(1)}, checkpoint_id=bad, storage_writer=memory_storage_writer)  # noqa: E731
        return failing(save)

    @scenario
    def an_object_that_nothing_can_serialise():
        state = {"good": torch.ones(2), "bad": {"lock": __import__("threading").Lock()} if rank == 1 else 1}
        save = lambda: dcp.save(state, checkpoint_id=str(version(6)), storage_writer=memory_storage_writer)  # noqa: E731
        failed = failing(save)
        return {**failed, "latest": checkpoint_loader.get_latest_complete_checkpoint(base_container)}

    @scenario
    def a_planner_that_gives_neither_tensor_nor_bytes():
        class Strange(DefaultSavePlanner):
            def transform_object(self, write_item, object):
                return (
                    {"not": "storable"}
                    if write_item.index.fqn == "odd"
                    else super().transform_object(write_item, object)
                )

        state = {"good": torch.ones(2), "odd": torch.ones(3)}
        return failing(
            lambda: dcp.save(
                state, checkpoint_id=str(version(7)), storage_writer=memory_storage_writer, planner=Strange()
            )
        )

    @scenario
    def a_planner_whose_data_is_not_plain():
        class Chatty(DefaultSavePlanner):
            def create_global_plan(self, all_plans):
                plans, metadata = super().create_global_plan(all_plans)
                metadata.planner_data = {"note": io.StringIO("x")}
                return plans, metadata

        failed = failing(
            lambda: dcp.save(
                {"a": torch.ones(2)},
                checkpoint_id=str(version(8)),
                storage_writer=memory_storage_writer,
                planner=Chatty(),
            )
        )
        return {**failed, "latest": checkpoint_loader.get_latest_complete_checkpoint(base_container)}

    @scenario
    def a_save_after_failed_ones():
        state = full_state(9)
        dcp.save(state, checkpoint_id=str(version(9)), storage_writer=memory_storage_writer)
        return {"differing": differing(load(checkpoint_loader.get_latest_complete_checkpoint(base_container)), state)}

    @scenario
    def the_step_that_failed_again():
        save = lambda: dcp.save(full_state(9), checkpoint_id=str(version(9)), storage_writer=memory_storage_writer)  # noqa: E731
        again = failing(save)
        return {"again": again["failures"], "latest": checkpoint_loader.get_latest_complete_checkpoint(base_container)}

    checkpoint_object_manager.close()

    # --- the short form --------------------------------------------------------------------------------------------
    store = MemoryStore.from_env(base_container=f"{base}/short", job_id="short")

    def short_load(into=None, planner=None):
        into = blank() if into is None else into
        dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader, planner=planner)
        return into

    @scenario
    def short_form():
        for step in (1, 2, 3):
            state = full_state(step)
            dcp.save(state, checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)
        return {"latest": store.latest(), "differing": differing(short_load(), state)}

    @scenario
    def a_second_store():
        try:
            MemoryStore.from_env(base_container=f"{base}/short", job_id="short")
            refused = ""
        except StoreInUseError as error:
            refused = str(error)
        dist.barrier()
        state = full_state(4)
        dcp.save(state, checkpoint_id=store.version(4), storage_writer=store.writer, planner=store.planner)
        return {"refused": refused, "latest": store.latest(), "differing": differing(short_load(), state)}

    @scenario
    def planners_of_the_users_own():
        class Renaming(DefaultSavePlanner):
            def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
                super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)

        class Halving(DefaultSavePlanner):
            def transform_object(self, write_item, object):
                object = super().transform_object(write_item, object)
                return object if write_item.type is WriteItemType.BYTE_IO else object.to(torch.float16)

        class Renamed(DefaultLoadPlanner):
            def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
                self.mine = state_dict
                super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, metadata, is_coordinator)

        one = {"a": torch.arange(6.0), "b": torch.arange(3.0) + rank}
        dcp.save(one, checkpoint_id=store.version(10), storage_writer=store.writer, planner=Renaming())
        into = {"a": torch.zeros(6), "b": torch.zeros(3)}
        dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader, planner=Renamed())
        dcp.save(one, checkpoint_id=store.version(11), storage_writer=store.writer, planner=Halving())
        halved = {"a": torch.zeros(6, dtype=torch.float16), "b": torch.zeros(3, dtype=torch.float16)}
        short_load(halved)
        widened = {"a": torch.zeros(6), "b": torch.zeros(3)}
        short_load(widened)
        return {"renamed": into["a"].tolist(), "halved": halved["a"].tolist(), "widened": widened["a"].tolist()}

    @scenario
    def thousands_of_small_tensors():
        def small(step):
            return {"t": {str(i): torch.full((3,), float(step * 10_000 + i)) for i in range(2000)}}

        asked = []

        class Counting(type(store.planner)):
            def create_local_plan(self):
                plan = super().create_local_plan()
                asked.append(len(plan.items))
                return plan

        planner = Counting()
        for step in (20, 21, 22):
            dcp.save(small(step), checkpoint_id=store.version(step), storage_writer=store.writer, planner=planner)
        into = small(0)
        short_load(into)
        equal = differing(into, small(22)) == []
        changed = small(23)
        changed["t"]["7"] = torch.ones(4, 4)
        dcp.save(changed, checkpoint_id=store.version(23), storage_writer=store.writer, planner=planner)
        into = small(0)
        into["t"]["7"] = torch.zeros(4, 4)
        short_load(into)
        return {"planned": asked, "equal": equal, "changed_equal": differing(into, changed) == []}

    @scenario
    def a_state_of_another_shape():
        dcp.save({"w": torch.ones(4)}, checkpoint_id=store.version(30), storage_writer=store.writer)
        latest = store.latest()
        wrong = lambda: dcp.load({"w": torch.ones(5)}, checkpoint_id=latest, storage_reader=store.reader)  # noqa: E731
        return failing(wrong)

    @scenario
    def each_rank_for_itself():
        state = {"mine": torch.full((3,), float(rank)), "who": rank}
        dcp.save(state, checkpoint_id=store.version(31), storage_writer=store.writer, no_dist=True)
        into = {"mine": torch.zeros(3), "who": -1}
        dcp.load(into, checkpoint_id=store.latest(), storage_reader=store.reader, no_dist=True)
        return {"mine": into["mine"].tolist(), "who": into["who"]}

    @scenario
    def a_corrupt_shard():
        state = full_state(3)
        dcp.save(state, checkpoint_id=store.version(40), storage_writer=store.writer)
        dcp.save(full_state(4), checkpoint_id=store.version(41), storage_writer=store.writer)
        store.runtime.flush()
        dist.barrier()
        if rank == 1:
            from mlflashpoint.core.arena import file_of, scan_seat

            seat = Path(base) / "short" / "default" / "seat-1"
            (slot,) = [slot for slot in scan_seat(seat) if slot.record is not None and slot.record.step == 41]
            with open(file_of(slot.path, "data"), "r+b") as data:
                first = data.read(1)
                data.seek(0)
                data.write(bytes([first[0] ^ 1]))
        dist.barrier()
        into = blank()
        direct = MemoryStorageReader(store.version(41), DefaultMLFlashpointCheckpointLoader(CheckpointObjectManager()))
        refused = failing(lambda: dcp.load(into, checkpoint_id=store.version(41), storage_reader=direct))
        latest = store.latest()
        return {"refused": refused, "latest": latest, "differing": differing(short_load(), state)}

    store.close()

    # --- a checkpoint process --------------------------------------------------------------------------------------
    @scenario
    def the_long_form_with_a_process():
        _, writer, loader = long_form(initial_buffer_size_bytes=1 << 30, use_optimized_save=True)
        for step in (1, 2):
            state, expected = full_state(step), full_state(step)
            future = dcp.async_save(
                state,
                checkpoint_id=str(version(step, "long")),
                storage_writer=writer,
                async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
            )
            for _, leaf in leaves(state):
                if isinstance(leaf, torch.Tensor):
                    (leaf.to_local() if hasattr(leaf, "to_local") else leaf).detach().zero_()
            future.result()
        latest = loader.get_latest_complete_checkpoint(f"{base}/long")
        into = blank()
        dcp.load(into, checkpoint_id=str(latest), storage_reader=MemoryStorageReader(latest, loader))
        slots = sum(file.stat().st_blocks * 512 for file in Path(base, "long").rglob("*.data"))
        return {"latest": latest, "differing": differing(into, expected), "store_bytes": slots}

    @scenario
    def async_save_with_a_process():
        process_store = MemoryStore.from_env(base_container=f"{base}/process", job_id="process")
        before = process_store.latest()
        for step in (1, 2):
            state, expected = full_state(step), full_state(step)
            future = dcp.async_save(
                state,
                checkpoint_id=process_store.version(step),
                storage_writer=process_store.writer,
                async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
            )
            for _, leaf in leaves(state):
                if isinstance(leaf, torch.Tensor):
                    (leaf.to_local() if hasattr(leaf, "to_local") else leaf).detach().zero_()
            future.result()
        latest = process_store.latest()
        into = blank()
        dcp.load(into, checkpoint_id=latest, storage_reader=process_store.reader)
        mixed = failing(
            lambda: dcp.save(state, checkpoint_id=process_store.version(3), storage_writer=process_store.writer)
        )
        return {"before": before, "latest": latest, "differing": differing(into, expected), "mixed": mixed}

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
