"""One rank of the job of test_dcp_failures.py: what goes wrong on one rank of two nodes, through each kind of save.

Usage: dcp_failures.py WHAT DURABLE

The trouble is always that of rank 3, on node 1, or of that node.
"""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapter" / "pytorch"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import failing, killed, scenarios
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mlflashpoint.adapter.pytorch import MemoryStorageReader, MemoryStore
from mlflashpoint.core.arena import file_of, scan_seat

LARGE = 8 << 20


def main(what, durable):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    scenario = scenarios(results)
    base = Path(os.environ["MLFLASHPOINT_BASE_CONTAINER"])
    stores = {
        "sync": MemoryStore.from_env(),
        "thread": MemoryStore.from_env(group="thread"),
        "process": MemoryStore.from_env(group="process"),
    }

    def state(step, numbers=1000, **more):
        return {f"rank{rank}": torch.full((numbers,), float(step)), "step": step, **more}

    def save(kind, step, content, **options):
        store = stores[kind]
        options |= {"checkpoint_id": store.version(step), "storage_writer": store.writer}
        if kind == "sync":
            dcp.save(content, **options)
        else:
            checkpointer = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD
            dcp.async_save(content, async_checkpointer_type=checkpointer, **options).result()

    def newest(kind):
        """Step of the newest version, and what this rank finds in it."""
        store, into = stores[kind], state(-1)
        found = store.latest()
        dcp.load(into, checkpoint_id=found, storage_reader=store.reader)
        return [found.step, into["step"], into[f"rank{rank}"].unique().tolist()]

    def full(on):
        """Leave node 1's memory a megabyte, or give it back."""
        if rank == 2:
            used = int(subprocess.check_output(["df", "--output=used", "-B1", "/dev/shm"], text=True).split()[-1])
            size = used + (1 << 20) if on else 512 << 20
            subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
        dist.barrier()

    if what == "save":

        @scenario
        def a_type_that_is_not_allowed():
            found = {}
            for kind in stores:
                save(kind, 1, state(1))
                bad = {"bad": {"lock": threading.Lock()}} if rank == 3 else {}
                failed = failing(lambda kind=kind, bad=bad: save(kind, 2, state(2, **bad)))
                before = newest(kind)
                save(kind, 3, state(3))
                found[kind] = {**failed, "before": before, "after": newest(kind)}
            return found

        @scenario
        def a_full_store():
            found = {}
            for kind in stores:
                full(True)
                numbers = LARGE if rank == 3 else 1000
                failed = failing(lambda kind=kind, n=numbers: save(kind, 4, state(4, n)))
                before = newest(kind)
                full(False)
                save(kind, 5, state(5))
                found[kind] = {**failed, "before": before, "after": newest(kind)}
            return found

        @scenario
        def a_path_that_holds_no_version_on_one_rank():
            good, none = stores["sync"].version(5), f"{base}-nowhere/step-5_ckpt"
            reader = MemoryStorageReader(none if rank == 3 else good, stores["sync"].loader)
            return failing(lambda: dcp.load(state(-1), storage_reader=reader))

        def damage(folder, step):
            """Change a byte of rank 3's shard of ``step`` in each copy below ``folder``."""
            for seat in {commit.parent for commit in folder.rglob("*.commit")}:
                for slot in scan_seat(seat):
                    if slot.record is not None and (slot.record.step, slot.record.rank) == (step, 3):
                        with open(file_of(slot.path, "data"), "r+b") as data:
                            first = data.read(1)
                            data.seek(0)
                            data.write(bytes([first[0] ^ 1]))

        @scenario
        def a_corrupted_shard():
            for step in (6, 7):
                save("sync", step, state(step))
            newest("sync")
            stores["sync"].runtime.flush()
            found = []
            # Its own copy, which is then replaced by the replica on node 0; and then both.
            for damaging in ((3,), (0, 3)):
                dist.barrier()
                if rank in damaging:
                    damage(base / "default", 7)
                dist.barrier()
                found.append(newest("sync"))
            return found

        @scenario
        def each_rank_for_itself():
            own = MemoryStore.from_env(group="own")
            dcp.save(state(1), checkpoint_id=own.version(1), storage_writer=own.writer, no_dist=True)
            return own.latest().step

        killed()

    @scenario
    def another_world_size_without_resharding():
        own = MemoryStore.from_env(group="own")
        found = own.latest()
        return failing(lambda: dcp.load(state(-1), checkpoint_id=found, storage_reader=own.reader))

    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
