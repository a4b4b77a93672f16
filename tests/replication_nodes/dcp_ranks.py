"""One rank of the job of test_dcp.py: DCP's library form on several nodes, replicas as they are by default.

Usage: dcp_ranks.py WHAT DURABLE

What the ranks of one start do and see is in their reports, as in tests/adapter/pytorch/launch.py.
"""

import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapter" / "pytorch"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import killed, scenarios
from states import blank, differing, full_state

from mlflashpoint.adapter.pytorch import MemoryStore
from mlflashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from mlflashpoint.core.checkpoint_id_types import CheckpointContainerId
from mlflashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from mlflashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from mlflashpoint.core.node_versions import version_of
from mlflashpoint.replication.replication_manager import ReplicationManager

what, durable = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
results = {}
scenario = scenarios(results)


class LongForm:
    """The guide's own objects, under the names that a store of the short form has."""

    def __init__(self, base):
        self.base = CheckpointContainerId(base)
        stores, replication = CheckpointObjectManager(), ReplicationManager()
        replication.initialize(stores)
        self.loader = DefaultMLFlashpointCheckpointLoader(
            checkpoint_object_manager=stores,
            replication_manager=replication,
            global_rank_getter=dist.get_rank,
            local_rank_getter=dist.get_node_local_rank,
            broadcast_object_list_func=dist.broadcast_object_list,
            all_gather_object_func=dist.all_gather_object,
            world_size_getter=dist.get_world_size,
        )
        self.writer = MemoryStorageWriter(
            checkpoint_saver=DefaultMLFlashpointCheckpointSaver(
                global_rank_getter=dist.get_rank,
                local_rank_getter=dist.get_node_local_rank,
                global_barrier_func=lambda: dist.barrier(),
                ckpt_obj_manager=stores,
                replication_manager=replication,
            )
        )
        self.reader = MemoryStorageReader(path=self.base, checkpoint_loader=self.loader)
        self.planner, self.close = None, stores.close

    def version(self, step):
        return version_of(self.base, step)

    def latest(self):
        return self.loader.get_latest_complete_checkpoint(self.base)


memory = os.environ["MLFLASHPOINT_BASE_CONTAINER"]
forms = {"short": MemoryStore.from_env(), "long": LongForm(f"{memory}-long")}


def compared(form):
    """What memory gives, against the durable checkpoint of the step."""
    store = forms[form]
    latest = store.latest()
    into, expected = blank(), blank()
    dcp.load(into, checkpoint_id=latest, storage_reader=store.reader)
    dcp.load(expected, checkpoint_id=durable / f"{form}-{latest.step}")
    fresh = blank()
    return {"step": latest.step, "differing": differing(into, expected), "changed": len(differing(into, fresh))}


if what == "save":

    @scenario
    def saved():
        for form, steps in (("short", (1, 2, 3)), ("long", (4, 5))):
            store = forms[form]
            for step in steps:
                dcp.save(
                    full_state(step),
                    checkpoint_id=store.version(step),
                    storage_writer=store.writer,
                    planner=store.planner,
                )
            dcp.save(full_state(steps[-1]), checkpoint_id=durable / f"{form}-{steps[-1]}")
        return {form: store.latest().step for form, store in forms.items()}

    killed()
else:

    @scenario
    def short():
        return compared("short")

    @scenario
    def long():
        return compared("long")


for store in forms.values():
    store.close()
dist.destroy_process_group()
