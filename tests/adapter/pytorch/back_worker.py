"""One rank of the job that test_back.py starts: training goes back to an older version, or only looks at one."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(base):
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from launch import failing, scenarios
    from torch.distributed.checkpoint import DefaultSavePlanner

    from mlflashpoint.adapter.pytorch import MemoryStore, ReadOnlyStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    scenario = scenarios(results)

    class Job:
        """A store of its own with the steps 5 and 10, which every rank has saved."""

        def __init__(self, name, *, before=None, **options):
            self.base = f"{base}/{name}"
            custom, planner = "planner" in options, options.pop("planner", None)
            self.store = MemoryStore.from_env(base_container=self.base, job_id=name, **options)
            self.planner = planner if custom else self.store.planner
            if before is not None:
                self.save(before)
            self.save(5)
            self.save(10)

        def state(self, value):
            own = {f"own{rank}": torch.full((50,), float(value)), "all": torch.full((50,), float(value))}
            return {**own, "step": int(value)}

        def save(self, step, value=None, **options):
            dcp.save(
                self.state(step if value is None else value),
                checkpoint_id=self.store.version(step),
                storage_writer=self.store.writer,
                **{"planner": self.planner, **options},
            )

        def load(self, step, *keys, reader=None, **options):
            into = {key: value for key, value in self.state(0).items() if not keys or key in keys}
            reader = self.store.reader if reader is None else reader
            dcp.load(into, checkpoint_id=self.store.version(step), storage_reader=reader, **options)
            return into

        def again(self, value=77, **options):
            """What a save of step 10 again fails with, and what the newest version holds then."""
            failures = failing(lambda: self.save(10, value, **options))["failures"]
            return {"failures": failures, "newest": self.newest()}

        def newest(self):
            found = self.store.latest()
            into = self.state(0)
            dcp.load(into, checkpoint_id=found, storage_reader=self.store.reader)
            self.store.close()
            return [os.path.basename(found), into["step"], sorted({float(into[k][0]) for k in ("all", f"own{rank}")})]

    @scenario
    def all_ranks_go_back():
        job = Job("all")
        job.load(5)
        return job.again()

    @scenario
    def all_ranks_go_back_with_dcps_planner():
        job = Job("dcps", planner=None)
        job.load(5)
        return job.again()

    @scenario
    def nothing_is_loaded():
        return Job("nothing").again()

    @scenario
    def one_rank_alone_loads():
        job = Job("alone")
        if rank == 1:
            job.load(5, no_dist=True)
        dist.barrier()
        return job.again()

    @scenario
    def one_rank_alone_loads_and_the_next_step_is_saved():
        job = Job("next")
        if rank == 1:
            job.load(5, no_dist=True)
        dist.barrier()
        job.save(15)
        job.save(15)
        return job.newest()

    @scenario
    def each_rank_loads_another_version():
        # With three slots there are two older ones.
        job = Job("each", before=3, keep_versions=3)
        job.load((3, 5)[rank], no_dist=True)
        dist.barrier()
        return job.again()

    @scenario
    def all_ranks_look_at_a_part():
        job = Job("part")
        job.load(5, "all")
        return job.again()

    @scenario
    def all_ranks_look_and_load_the_newest_again():
        job = Job("look")
        job.load(5)
        job.load(10)
        return job.again()

    @scenario
    def all_ranks_look_with_a_reader_that_is_not_the_jobs():
        job = Job("reads")
        job.load(5, reader=ReadOnlyStore(job.base, job_id="reads").reader)
        return job.again()

    @scenario
    def one_rank_alone_calls_resumed():
        job = Job("resumed")
        if rank == 1:
            job.store.runtime.resumed(5)
        job.load(5)
        return job.again()

    @scenario
    def a_planner_that_drops_the_marks():
        class Dropping(DefaultSavePlanner):
            def create_global_plan(self, all_plans):
                plans, metadata = super().create_global_plan(all_plans)
                return [type(plan)(plan.items, planner_data=plan.planner_data) for plan in plans], metadata

        job = Job("drops", planner=Dropping())
        job.load(5)
        return job.again()

    @scenario
    def after_the_refusal_all_ranks_load():
        job = Job("after")
        if rank == 0:
            job.load(5, no_dist=True)
        dist.barrier()
        failed = failing(lambda: job.save(10, 77))["failures"]
        job.load(5)
        return [[kind for kind, _ in failed.values()], job.again()]

    @scenario
    def an_async_save_after_going_back():
        job = Job("async")
        job.load(5)
        pending = dcp.async_save(
            job.state(77), checkpoint_id=job.store.version(10), storage_writer=job.store.writer, planner=job.planner
        )
        pending.result()
        return job.newest()

    def in_a_process(name, load):
        store = MemoryStore.from_env(base_container=f"{base}/{name}", job_id=name)

        def state(value):
            return {f"own{rank}": torch.full((50,), float(value)), "step": int(value)}

        def save(step, value):
            dcp.async_save(
                state(value),
                checkpoint_id=store.version(step),
                storage_writer=store.writer,
                async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
            ).result()

        save(5, 5)
        save(10, 10)
        store.latest()
        where = {"checkpoint_id": store.version(5), "storage_reader": store.reader}
        load(lambda **options: dcp.load(state(0), **where, **options))
        dist.barrier()
        failures = failing(lambda: save(10, 77))["failures"]
        found, into = store.latest(), state(0)
        dcp.load(into, checkpoint_id=found, storage_reader=store.reader)
        store.close()
        newest = [os.path.basename(found), into["step"], [float(into[f"own{rank}"][0])]]
        return {"failures": failures, "newest": newest}

    @scenario
    def all_ranks_go_back_beside_a_checkpoint_process():
        return in_a_process("process", lambda load: load())

    @scenario
    def one_rank_alone_loads_beside_a_checkpoint_process():
        return in_a_process("beside", lambda load: load(no_dist=True) if rank == 1 else None)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
