"""One rank of the job that test_pending.py starts. The only stand-in is for a slow machine: a commit takes longer."""

import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


class Unregistered:
    """What a user may leave in a state without thinking of it."""

    def __init__(self, value):
        self.value = value


class Allowed(Unregistered):
    pass


class Listed(Unregistered):
    pass


def main(base):
    import io
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import failing, scenarios
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    from mlflashpoint.adapter.pytorch import MemoryStore
    from mlflashpoint.core.saver import ShardSaver
    from mlflashpoint.core.state import register_leaf

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results, slow, records = {}, {}, []

    class Collect(logging.Handler):
        def emit(self, record):
            records.append([record.levelname, record.getMessage()])

    logger = logging.getLogger("mlflashpoint")
    logger.addHandler(Collect())
    logger.setLevel(logging.INFO)

    commit = ShardSaver.commit

    def slowly(self, *args, **kwargs):
        time.sleep(slow.get(rank, 0))
        return commit(self, *args, **kwargs)

    ShardSaver.commit = slowly

    scenario = scenarios(results)

    def state(step):
        return {"all": torch.full((1000,), float(step)), f"rank{rank}": torch.full((500,), float(step)), "step": step}

    states = {step: state(step) for step in range(200)}
    store = MemoryStore.from_env(base_container=f"{base}/job", job_id="job")

    def save(step, **options):
        options = {"planner": store.planner, **options}
        dcp.save(states[step], checkpoint_id=store.version(step), storage_writer=store.writer, **options)

    def save_async(step, **options):
        options = {"planner": store.planner, **options}
        return dcp.async_save(states[step], checkpoint_id=store.version(step), storage_writer=store.writer, **options)

    def load(step):
        into = state(0)
        dcp.load(into, checkpoint_id=store.version(step), storage_reader=store.reader)
        return [into["all"].unique().tolist(), into[f"rank{rank}"].unique().tolist(), into["step"]]

    def load_after_save_where(rank, step):
        slow.clear()
        slow[rank] = 0.3
        save(step)
        return load(step)

    @scenario
    def a_load_after_a_save_that_rank_0_commits_late():
        return load_after_save_where(0, 1)

    @scenario
    def a_load_after_a_save_that_rank_1_commits_late():
        return load_after_save_where(1, 2)

    @scenario
    def the_newest_after_a_save():
        save(3)
        return store.latest()

    @scenario
    def a_load_after_the_future_of_an_async_save():
        save_async(4).result()
        return load(4)

    @scenario
    def saves_without_a_pause():
        slow.clear()
        slow[0] = 0.3
        before = store.runtime.stats()["versions_failed"]
        for step in range(10, 15):
            save(step)
        # Two slots hold two versions: a save that reported success has to be one of them.
        return {
            "loaded": [load(14), load(13)],
            "newest": store.latest(),
            "failed": store.runtime.stats()["versions_failed"] - before,
        }

    @scenario
    def async_saves_without_waiting_for_the_one_before():
        before = store.runtime.stats()["versions_failed"]
        futures = [save_async(step) for step in range(20, 24)]
        kinds = [type(future.result()).__name__ for future in futures]
        return {
            "kinds": kinds,
            "loaded": load(23),
            "failed": store.runtime.stats()["versions_failed"] - before,
        }

    @scenario
    def a_save_while_an_async_save_is_under_way():
        future = save_async(24)
        save(25)
        return [type(future.result()).__name__, load(24), load(25)]

    @scenario
    def a_save_that_finds_no_slot_in_time():
        slow[0] = 1.0
        object.__setattr__(store.runtime.config, "busy_wait_s", 0.1)
        save(30)
        skipped = failing(lambda: save(31))
        again = failing(lambda: save(31))
        object.__setattr__(store.runtime.config, "busy_wait_s", 30.0)
        slow.clear()
        save(32)
        object.__setattr__(store.runtime.config, "busy_wait_s", 5.0)
        return {"skipped": skipped, "again": again, "after": load(32)}

    @scenario
    def a_good_run_in_the_log():
        store.runtime.flush()
        dist.barrier()
        del records[:]
        for step in range(40, 45):
            save(step)
            load(step)
        save_async(45).result()
        load(45)
        store.runtime.flush()
        return {"records": list(records), "saves": 6}

    @scenario
    def the_newest_after_a_save_whose_planner_failed_on_one_rank():
        class Failing(DefaultSavePlanner):
            def finish_plan(self, new_plan):
                if rank == 1:
                    raise ValueError("no plan")
                return super().finish_plan(new_plan)

        save(50)
        failed = failing(lambda: save(51, planner=Failing()))
        began = time.monotonic()
        newest = store.latest()
        seconds = time.monotonic() - began
        save(52)
        return {**failed, "newest": newest, "seconds": seconds, "after": load(52)}

    def refused(step, planner=None, asynchronous=False):
        good = step - 1
        states[good] = {**state(good), "thing": {"many": [1, 2]}}
        save(good)
        states[step] = {**state(step), "thing": {"many": [1, Unregistered(2)] if rank == 1 else [1, 2]}}
        # A key that no other rank has: it is this rank that writes it.
        states[step][f"own{rank}"] = states[step].pop("thing")
        run = (
            (lambda: save_async(step, planner=planner).result())
            if asynchronous
            else lambda: save(step, planner=planner)
        )
        failed = failing(run)
        return {**failed, "newest": store.latest(), "before": load(good)}

    @scenario
    def an_unregistered_object_with_the_stores_planner():
        return refused(101, store.planner)

    @scenario
    def an_unregistered_object_with_dcps_planner():
        return refused(103)

    @scenario
    def an_unregistered_object_in_an_async_save():
        return refused(105, store.planner, asynchronous=True)

    def uncopied(step, planner=None):
        save(step - 1)
        if rank == 1:
            # It has no data to copy.
            states[step]["all"] = torch.ones(1000, device="meta")
        failed = failing(lambda: save_async(step, planner=planner).result())
        return {**failed, "newest": store.latest(), "before": load(step - 1)}

    @scenario
    def a_tensor_that_one_rank_cant_copy_with_the_stores_planner():
        return uncopied(107, store.planner)

    @scenario
    def a_tensor_that_one_rank_cant_copy_with_dcps_planner():
        return uncopied(109)

    def there_and_back(step, thing, planner=None):
        states[step] = {f"thing{rank}": thing}
        save(step, planner=planner)
        into = {f"thing{rank}": type(thing)(0)}
        dcp.load(into, checkpoint_id=store.version(step), storage_reader=store.reader)
        return [type(into[f"thing{rank}"]).__name__, into[f"thing{rank}"].value]

    @scenario
    def an_object_on_our_allow_list():
        register_leaf("tests.Allowed", Allowed, lambda value: value.value, Allowed)
        return there_and_back(110, Allowed(7), store.planner)

    @scenario
    def an_object_on_torchs_allow_list():
        torch.serialization.add_safe_globals([Listed])
        return there_and_back(111, Listed(8))

    @scenario
    def a_planner_that_serialises_by_itself():
        class Own(DefaultSavePlanner):
            def transform_object(self, write_item, object):
                if write_item.type is not WriteItemType.BYTE_IO:
                    return object
                buffer = io.BytesIO()
                torch.save(object, buffer)
                return buffer

        return there_and_back(112, Unregistered(9), Own())

    @scenario
    def a_rollback_to_a_step_whose_save_had_failed():
        save(120)
        bad = {**states[122], **({"bad": Unregistered(1)} if rank == 1 else {})}

        def save_bad():
            dcp.save(bad, checkpoint_id=store.version(122), storage_writer=store.writer, planner=store.planner)

        failed = sorted(failing(save_bad)["failures"])
        save(123)
        save(121)
        newest = [store.latest().step]
        save(122)
        return {"failed": failed, "newest": [*newest, store.latest().step], "loaded": load(122)}

    @scenario
    def one_rank_saves_elsewhere():
        save(130)
        where = store.version(131) if rank == 0 else f"{base}/elsewhere/step-131_ckpt"
        wrong = failing(lambda: dcp.save(states[131], checkpoint_id=where, storage_writer=store.writer))
        save(132)
        return {"failures": wrong["failures"], "newest": store.latest().step, "loaded": load(132)}

    store.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["pending_worker"] = sys.modules["__main__"]
    main(*sys.argv[1:])
    os._exit(0)
