"""One rank whose checkpoint process hangs in a save: it never comes back from the planner."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mlflashpoint.adapter.pytorch import MemoryStore


class Hanging(DefaultSavePlanner):
    def resolve_data(self, item):
        told = Path(os.environ["REPORTS"], "hangs.tmp")
        told.write_text(str(os.getpid()))
        told.rename(told.with_suffix(""))
        time.sleep(600)


def main():
    dist.init_process_group("gloo")
    store = MemoryStore.from_env()
    where = {"checkpoint_id": store.version(1), "storage_writer": store.writer, "planner": Hanging()}
    dcp.async_save({"w": torch.ones(4)}, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **where).result()


if __name__ == "__main__":
    main()
