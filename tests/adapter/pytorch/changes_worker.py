"""One rank of the job that test_changes.py starts: saves that differ from the one before, or from rank to rank."""

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(base):
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import failing, scenarios
    from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

    from mlflashpoint.adapter.pytorch import MemoryStore
    from mlflashpoint.adapter.pytorch.finish import Save

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results, slow = {}, []
    scenario = scenarios(results)

    settle = Save.settle

    def slowly(self, *args, **kwargs):
        text = settle(self, *args, **kwargs)
        time.sleep(slow[-1] if slow else 0)
        return text

    # The only stand-in: a machine that is slow in the background.
    Save.settle = slowly

    def state(step, *more):
        return {f"{name}{rank}": torch.full((500,), float(step)) for name in ("own", *more)} | {"step": step}

    store = MemoryStore.from_env(base_container=f"{base}/job", job_id="job", keep_versions=3)

    def save(step, *more, **options):
        dcp.save(
            state(step, *more),
            checkpoint_id=store.version(step),
            storage_writer=store.writer,
            **{"planner": store.planner, **options},
        )

    def newest(*more, **options):
        found, into = store.latest(), state(-1, *more)
        dcp.load(into, checkpoint_id=found, storage_reader=store.reader, **options)
        values = sorted({float(value[0]) for key, value in into.items() if key != "step"})
        return [os.path.basename(found), into["step"], values]

    @scenario
    def structures_in_turn_while_the_background_is_late():
        slow.append(0.3)
        save(1)
        save(2, "more")
        # The first save is settled by now on all ranks, the second is not.
        time.sleep(0.45)
        result = failing(lambda: save(3))
        slow.clear()
        return {**result, "newest": list(map(str, newest()))}

    @scenario
    def a_save_of_all_ranks_after_one_of_each_for_itself():
        found = []
        for step, options in enumerate(({}, {"no_dist": True}, {}, {"use_collectives": False}, {}), 10):
            found += failing(lambda s=step, o=options: save(s, planner=None, **o))["failures"].items()
            found.append(store.runtime.await_version(step))
        return found

    @scenario
    def ranks_that_save_different_steps():
        save(20)
        failed = failing(lambda: save(70 + rank))
        again = failing(lambda: save(70 + rank, "more", planner=None))
        return {"failed": failed, "again": again, "newest": newest()}

    @scenario
    def after_ranks_that_saved_different_steps():
        found = []
        for step in (70, 71):
            found += failing(lambda s=step: save(s))["failures"].items()
            found.append(newest()[:2])
        return found

    @scenario
    def a_step_is_saved_after_its_plan_had_failed():
        class Failing(DefaultSavePlanner):
            def create_local_plan(self):
                if rank == 1:
                    raise ValueError("no plan")
                return super().create_local_plan()

        failed = failing(lambda: save(80, planner=Failing()))
        again = failing(lambda: save(80))
        return [list(failed["failures"]), again["failures"], newest()[:2]]

    @scenario
    def a_state_that_contains_itself_on_one_rank():
        odd = {}
        odd["again"] = odd if rank == 1 else 1
        beside, found = dist.new_group(backend="gloo"), []

        def run(step, save=dcp.save, **options):
            content = {**state(step), "odd": odd}
            begun = save(content, checkpoint_id=store.version(step), storage_writer=store.writer, **options)
            return begun.result() if save is dcp.async_save else begun

        found.append(failing(lambda: run(100, planner=store.planner))["failures"])
        for step, planner in ((101, {"planner": store.planner}), (102, {})):
            options = {"save": dcp.async_save, "process_group": beside, **planner}
            found.append(failing(lambda s=step, o=options: run(s, **o))["failures"])
        return [*found, failing(lambda: save(103))["failures"], newest()[:2]]

    @scenario
    def a_planner_that_keeps_one_ranks_plan():
        class Caching(DefaultSavePlanner):
            """Sends a plan once, as DCP's own planner with ``enable_plan_caching``."""

            first = None

            def create_global_plan(self, all_plans):
                kept, Caching.first = Caching.first, Caching.first or all_plans
                return super().create_global_plan([*all_plans[:1], *kept[1:]] if kept else all_plans)

        found = []
        for step in (90, 91):
            found += failing(lambda s=step: save(s, planner=Caching()))["failures"].items()
            found.append(newest()[:2])
        return found

    def refusal(state, step, **options):
        """What a save of ``state`` on rank 1, and of something else on rank 0, fails with."""

        def run():
            dcp.save(
                state if rank == 1 else {"own": torch.ones(1)},
                checkpoint_id=store.version(step),
                storage_writer=store.writer,
                **{"planner": store.planner, **options},
            )

        found = failing(run)["failures"]
        return [*found["1"], list(found)] if "1" in found else found

    @scenario
    def nested_tensors():
        parts = [torch.ones(2), torch.ones(3)]
        return [
            refusal({"deep": {"n": torch.nested.nested_tensor(parts, layout=layout)}}, step)
            for step, layout in ((100, torch.strided), (101, torch.jagged))
        ]

    @scenario
    def a_nested_tensor_on_one_rank_in_an_async_save():
        state = {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])} if rank == 1 else {"own": rank}
        found = failing(
            lambda: dcp.async_save(
                state, checkpoint_id=store.version(102), storage_writer=store.writer, planner=store.planner
            ).result()
        )["failures"]
        return [found["1"], list(found)]

    @scenario
    def a_planner_whose_resolve_data_raises():
        class Raising(DefaultSavePlanner):
            def resolve_data(self, write_item):
                if rank == 1 and write_item.index.fqn == "bad1":
                    raise ValueError("boom")
                return super().resolve_data(write_item)

        try:
            dcp.save(
                {"good": torch.ones(2), f"bad{rank}": torch.ones(2)},
                checkpoint_id=store.version(110),
                storage_writer=store.writer,
                planner=Raising(),
            )
        except CheckpointException as error:
            ((number, (found, _)),) = error.failures.items()
            return [number, type(found).__name__, str(found), getattr(found, "__notes__", [])]

    @scenario
    def objects_that_are_not_plain():
        state = {"deep": {"lock": threading.Lock()}}
        return [refusal(state, 120), refusal(state, 121, planner=None)]

    store.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
