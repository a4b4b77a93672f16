"""One rank of the job of test_trouble.py: one rank alone has trouble in a save or in a load."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ranks import begin, failing, own_of, plain, uneven


class Odd:
    """Its kind may be unpickled by whoever says so."""


@contextlib.contextmanager
def replaced(owner, name, function):
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def main(what, base, durable):
    rank, world_size, scenario, results = begin()
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import report
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from torch.distributed.checkpoint.utils import _DistWrapper

    from mlflashpoint.adapter.megatron import MegatronStore, folder, planning
    from mlflashpoint.adapter.megatron.readiness import all_ready
    from mlflashpoint.adapter.pytorch.finish import Save
    from mlflashpoint.adapter.pytorch.shards import Shards
    from mlflashpoint.core.arena import file_of, scan_seat
    from mlflashpoint.errors import ContainerError, NoVersionError

    def opened(name, **settings):
        return MegatronStore.from_env(base_container=f"{base}/{name}", job_id=name, **settings)

    def state(step, **more):
        return plain(step, rank, world_size, **more)

    def back(store, version=None):
        """Tensor and common state of a version, the newest by default."""
        version = store.latest() if version is None else version
        loaded = store.load({"t": state(0)["t"]}, version)
        return [loaded["t"][0].tolist()[0], loaded["iteration"]]

    def saves(name):
        @scenario
        def one_rank_changes_early():
            """Rank 1 alone has another structure at some saves, first before any plan was kept."""
            store = opened("early")
            seconds, found = [], []
            for step, width in enumerate((3, 5, 5, 5, 5, 7, 7, 7, 7, 7)):
                own = uneven(step, rank, world_size, width if rank == 1 else 3)
                seconds.append(failing(lambda: store.save(own, step, async_save=False)))  # noqa: B023
                into = uneven(0, rank, world_size, width if rank == 1 else 3)
                del into["iteration"]
                found.append(own_of(store.load(into, store.latest()), rank))
            return {"saves": seconds, "found": found}

        def goes_on(store, step):
            return failing(lambda: store.save(state(step), step, async_save=False))["kind"], back(store)

        @scenario
        def a_common_state_that_cant_be_pickled():
            store = opened("common")
            store.save(state(1), 1, async_save=False)
            bad = threading.Lock() if rank == 1 else 1
            refused = failing(lambda: store.save(state(2, odd={"bad": bad}), 2, async_save=False))
            return {"refused": refused, "kept": back(store), "next": goes_on(store, 3)}

        @scenario
        def a_common_state_that_contains_itself():
            store = opened("itself")
            store.save(state(1), 1, async_save=False)
            odd = {"list": [1]}
            if rank == 1:
                odd["list"].append(odd)
            refused = failing(lambda: store.save(state(2, odd=odd), 2, async_save=False))
            return {"refused": refused, "kept": back(store), "next": goes_on(store, 3)}

        @scenario
        def a_common_state_that_rank_0_cant_pickle():
            """Megatron-Core sends that of rank 0 to the others before it saves anything."""
            store = opened("rank-0")
            bad = threading.Lock() if rank == 0 else 1
            refused = failing(lambda: store.save(state(2, bad=bad), 2, async_save=False))
            return {"refused": refused, "next": goes_on(store, 3)}

        @scenario
        def the_same_with_the_wrapper():
            store = opened("wrapped")
            wrapper = FullyParallelSaveStrategyWrapper(store.save_strategy, dist.group.WORLD, True)
            bad = threading.Lock() if rank == 1 else 1
            return {
                "refused": failing(lambda: store.save(state(2, bad=bad), 2, async_save=False, save_strategy=wrapper)),
                "next": goes_on(store, 3),
            }

        @scenario
        def a_sharding_with_a_hole():
            """Megatron-Core sees it on rank 0 alone."""
            store = opened("hole")
            holed = {"t": ShardedTensor.from_rank_offsets("t", torch.zeros(2, 2), (0, 0, 3)), "iteration": 2}
            return {"refused": failing(lambda: store.save(holed, 2, async_save=False)), "next": goes_on(store, 3)}

        @scenario
        def other_steps():
            store = opened("steps")
            return {
                "refused": failing(lambda: store.save(state(4 + rank), 4 + rank, async_save=False)),
                "next": goes_on(store, 6),
            }

        def saved_again(name, look):
            """Step 10 is saved again, with another state, after ``look`` at step 5."""
            store = opened(name)
            for step in (5, 10):
                store.save(state(step), step, async_save=False)
            store.runtime.flush()
            look(store)
            dist.barrier()
            refused = failing(lambda: store.save(state(77), 10, async_save=False))
            return {"refused": refused, "kept": back(store)}

        @scenario
        def a_step_again_after_all_ranks_went_back():
            return saved_again("back", lambda store: back(store, store.version(5)))

        def replicated(step):
            """What all ranks have alike, of which each writes or reads a part under the wrappers."""
            data = torch.full((4, 3), float(step * 10))
            return {
                **{f"same.{n}": ShardedTensor.from_rank_offsets(f"same.{n}", data, replica_id=rank) for n in range(6)},
                "iteration": step,
            }

        def parts_loaded(name, **how):
            store = opened(name)
            wrapper = FullyParallelLoadStrategyWrapper(store.load_strategy, dist.group.WORLD)

            def loaded(version):
                store.load_strategy.make_ready(version)
                into = replicated(0)
                del into["iteration"]
                return store.load(into, version, sharded_strategy=wrapper)

            def save(step, number):
                if how:
                    wrapped = FullyParallelSaveStrategyWrapper(store.save_strategy, dist.group.WORLD)
                    store.save(replicated(number), step, async_save=False, save_strategy=wrapped)
                else:
                    store.save(replicated(number), step, async_save=False)

            for step in (5, 10):
                save(step, step)
            store.runtime.flush()
            loaded(store.version(5))
            dist.barrier()
            refused = failing(lambda: save(10, 77))
            found = loaded(store.latest())
            return {"refused": refused, "kept": [found["same.3"][0].tolist()[0], found["iteration"]]}

        @scenario
        def a_step_again_after_each_rank_loaded_a_part():
            return parts_loaded("parts")

        @scenario
        def a_step_again_after_each_rank_loaded_the_part_that_it_saved():
            return parts_loaded("own-parts", wrapped=True)

        @scenario
        def a_step_again_after_one_rank_alone_loaded():
            def look(store):
                if rank == 1:
                    into = {"t": torch.zeros(4 * world_size, 3)}
                    dcp.load(into, checkpoint_id=store.version(5), storage_reader=store.reader, no_dist=True)

            return saved_again("alone", look)

        @scenario
        def a_step_again_after_a_part_was_loaded():
            def look(store):
                store.load_strategy.make_ready(store.version(5))
                with store.reader as reader:
                    dcp.load({}, checkpoint_id=store.version(5), storage_reader=reader)

            return saved_again("part", look)

        @scenario
        def a_step_again_without_a_load():
            return saved_again("again", lambda store: None)

        @scenario
        def an_id_that_is_none_on_one_rank():
            store = opened("ids")
            strategy = store.save_strategy
            where = str(store.version(1)) if rank == 0 else f"{store.base}/odd"
            sharded = {"t": state(1)["t"]}
            return {"refused": failing(lambda: strategy.save(sharded, where)), "next": goes_on(store, 2)}

        @scenario
        def side_files_of_a_refused_save():
            store = opened("side")
            bad = threading.Lock() if rank == 1 else 1
            refused = state(1)
            refused["bad"] = ShardedObject("bad", bad, (world_size,), (rank,))
            kind = failing(lambda: store.save(refused, 1, async_save=False))["kind"]
            version = store.version(2)
            Path(version).mkdir(exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(state(2), str(version), store.save_strategy)
            with store.reader as reader:
                reader.reset(store.latest())
                content = reader.shards().side_file(rank, folder.COMMON)
            path = Path(base) / f"stale-{rank}"
            path.write_bytes(content or b"")
            stored = None if content is None else torch.load(path)["iteration"]
            return {"refused": kind, "stored": stored, "kept": store.writer.side_files}

        @scenario
        def side_files_of_the_writers_owner():
            store = opened("owner")
            store.writer.side_files = {"mine": b"me"}
            for step in (1, 2):
                store.save(state(step), step, async_save=False)
            with store.reader as reader:
                reader.reset(store.latest())
                return {"content": reader.shards().side_file(rank, "mine").decode()}

        @scenario
        def a_folder_that_cant_be_written():
            store = opened("folder")
            store.save(state(1), 1, async_save=False)
            if rank == 0:
                Path(store.version(2)).write_text("in the way")
            dist.barrier()
            refused = failing(lambda: store.save(state(2), 2, async_save=False))
            return {"refused": refused, "next": goes_on(store, 3)}

        @scenario
        def a_rank_that_does_not_finalize():
            store = opened("late")
            store.save(state(1), 1, async_save=False)
            request = store.save(state(2), 2)

            def finalize():
                return failing(lambda: [each() for each in request.finalize_fns])

            # Only this wait is short: what comes before it may take long on a machine that is busy.
            with replaced(planning, "all_ready", lambda what, **more: all_ready(what, **{**more, "deadline_s": 2.0})):
                refused = finalize() if rank == 0 else {}
            dist.barrier()
            # It comes too late.
            refused = finalize() if rank == 1 else refused
            return {"refused": refused, "next": goes_on(store, 3)}

        @scenario
        def a_request_that_is_finalized_too_late():
            store = opened("too-late")
            store.save(state(1), 1, async_save=False)
            settle = Save.settle
            with replaced(Save, "settle", lambda self, *args, **more: settle(self, *args, **{**more, "deadline_s": 1})):
                request = store.save(state(2), 2)
                # Until no rank waits for it any more.
                give_up = time.monotonic() + 60
                while not store.runtime.stats()["saves_failed"]:
                    assert time.monotonic() < give_up, store.runtime.stats()
                    time.sleep(0.05)
            dist.barrier()
            return {"refused": failing(request.execute_sync), "next": goes_on(store, 3)}

        @scenario
        def requests_that_the_ranks_finalize_in_another_order():
            # A store for each, so that none waits for the other's slot.
            stores = [opened("order-1"), opened("order-2")]
            requests = [store.save(state(step), step) for step, store in enumerate(stores, 1)]
            refused = [failing(requests[mine].execute_sync) for mine in (rank, 1 - rank)]
            return {"refused": refused[0], "again": refused[1]["kind"], "next": goes_on(stores[0], 3)}

        @scenario
        def a_rank_that_is_interrupted_while_it_finalizes():
            store = opened("interrupted")
            request = store.save(state(1), 1)

            def interrupted(*args):
                raise KeyboardInterrupt

            with replaced(_DistWrapper, "all_reduce", interrupted):
                try:
                    request.execute_sync()
                except KeyboardInterrupt:
                    began = time.monotonic()
            store.runtime.flush()
            return {"failed": store.runtime.stats()["saves_failed"], "seconds": time.monotonic() - began}

        @scenario
        def two_requests_at_once():
            """The second save, of another structure, begins before the first request is finalized."""
            store = opened("two", keep_versions=3)
            requests = [
                store.save(uneven(step, rank, world_size, width), step) for step, width in ((1, 3), (2, 5), (3, 7))
            ]
            for request in requests:
                request.execute_sync()
            store.runtime.flush()
            found = []
            for step, width in ((1, 3), (2, 5), (3, 7)):
                into = uneven(0, rank, world_size, width)
                del into["iteration"]
                found.append(own_of(store.load(into, store.version(step)), rank))
            return {"newest": store.latest(), "found": found}

        @scenario
        def a_request_that_nobody_finalizes():
            store = opened("dropped")
            for step in (1, 2, 3):
                store.save(state(step), step)
            found = failing(lambda: store.save(state(4), 4, async_save=False))
            return {"refused": found, "next": goes_on(store, 5)}

        @scenario
        def a_state_that_one_rank_cant_plan():
            store = opened("planned")

            def broken(self):
                MCoreSavePlanner.create_local_plan = original
                raise ValueError("odd tensor")

            original = MCoreSavePlanner.create_local_plan
            if rank == 1:
                MCoreSavePlanner.create_local_plan = broken
            refused = failing(lambda: store.save(state(2), 2, async_save=False))
            return {"refused": refused, "next": goes_on(store, 2)}

        @scenario
        def plans_that_do_not_fit_together():
            """The coordinator sees it."""
            store = opened("together")

            def broken(self, plans):
                MCoreSavePlanner.create_global_plan = original
                raise ValueError("odd plans")

            original = MCoreSavePlanner.create_global_plan
            if rank == 0:
                MCoreSavePlanner.create_global_plan = broken
            refused = failing(lambda: store.save(state(2), 2, async_save=False))
            return {"refused": refused, "next": goes_on(store, 3)}

    def loads():
        def damage(store, step):
            for slot in scan_seat(Path(store.base) / "default" / f"seat-{rank}"):
                if slot.record is not None and slot.record.step == step:
                    with open(file_of(slot.path, "data"), "r+b") as data:
                        length = len(data.read())
                        data.seek(0)
                        data.write(bytes(length))

        def made(name, **more):
            store = opened(name)
            for step in (1, 2):
                store.save(state(step, **more), step, async_save=False)
            store.runtime.flush()
            return store

        def outcome(store, run):
            refused = failing(run)
            dist.barrier()
            return {"refused": refused, "earlier": back(store, store.version(1))}

        @scenario
        def a_corrupt_shard_on_one_rank():
            store = made("corrupt")
            if rank == 1:
                damage(store, 2)
            dist.barrier()
            return outcome(store, lambda: back(store, store.version(2)))

        @scenario
        def the_same_in_the_long_form():
            store = opened("corrupt-long")
            for step in (1, 2):
                store.save(state(step), step, async_save=False)
            store.runtime.flush()
            if rank == 1:
                damage(store, 2)
            dist.barrier()
            options = {"sharded_strategy": store.load_strategy}
            return outcome(
                store, lambda: dist_checkpointing.load({"t": state(0)["t"]}, str(store.version(2)), **options)
            )

        def on_rank_1(owner, name, error):
            """Replace a function on rank 1 by one that raises, once."""
            original = getattr(owner, name)

            def broken(*args, **kwargs):
                setattr(owner, name, original)
                raise error

            if rank == 1:
                setattr(owner, name, broken)

        @scenario
        def no_version_on_one_rank():
            store = made("none")
            on_rank_1(Shards, "on_node", NoVersionError("no version of step 2 on this node", step=2))
            return outcome(store, lambda: back(store, store.version(2)))

        @scenario
        def the_folder_is_gone():
            store = made("gone")
            dist.barrier()
            if rank == 0:
                (Path(store.version(2)) / folder.COMMON).unlink()
                (Path(store.version(2)) / folder.CONFIG).unlink()
                Path(store.version(2)).rmdir()
            dist.barrier()
            return {"back": back(store, store.version(2))}

        @scenario
        def a_folder_that_cant_be_restored():
            store = made("restored")
            on_rank_1(folder, "write_files", ContainerError("common.pt can't be written: no space"))
            return outcome(store, store.latest)

        @scenario
        def a_common_state_that_one_rank_cant_unpickle():
            store = made("unpickled", odd=Odd())
            if rank == 0:
                torch.serialization.add_safe_globals([Odd])
            refused = failing(lambda: back(store, store.version(2)))
            found = failing(store.latest)
            torch.serialization.add_safe_globals([Odd])
            return {"refused": refused, "found": found, "allowed": back(store, store.version(2))}

        @scenario
        def other_versions():
            store = made("others")
            refused = failing(lambda: back(store, store.version(1 + rank)))
            return {"refused": refused, "next": back(store)}

    saves(what) if what == "save" else loads()
    report(results)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
