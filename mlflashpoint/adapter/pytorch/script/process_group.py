"""The gloo group that memory saves and loads talk in, under a name that only these processes know.

``new_group`` numbers the groups, so a restart within one store finds the addresses of dead ranks under its own keys,
and may connect to them.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from mlflashpoint.core.connection import apart
from mlflashpoint.core.deadline import bounded


def connected_group(name: str, *, connect_s: float, timeout_s: float) -> Any:
    """A gloo group of all ranks; collective.

    Args:
        name: equal on all ranks, and new.
        connect_s: longest time for the ranks to connect; gloo's own is several times its timeout.
        timeout_s: of what is said in the group.

    Raises:
        DeadlineExceededError: some rank did not connect.
        RuntimeError: gloo can't.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def connect() -> Any:
        # gloo waits in the store for the others; on the job's connection that would hold up all who use it.
        store = PrefixStore(f"mlflashpoint/group-{name}", apart(distributed_c10d._get_default_store()))
        group, _ = distributed_c10d._new_process_group_helper(
            group_size=size,
            group_rank=rank,
            global_ranks_in_group=list(range(size)),
            backend=dist.Backend("gloo"),
            store=store,
            group_name=distributed_c10d.GroupName(f"mlflashpoint-{name}"),
            timeout=datetime.timedelta(seconds=timeout_s),
            group_desc="mlflashpoint",
        )
        distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
        return group

    return bounded(connect, connect_s, "connecting the process group of memory saves")
