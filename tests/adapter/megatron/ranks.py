"""For the ranks of a job on two ranks: what the workers of saves, of loads and of trouble have in common."""

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pytorch")]


def begin():
    """The process group and the scenarios of this rank: (rank, world size, decorator, results)."""
    import faulthandler
    import warnings

    # Shortly before the launcher gives up: where each rank hangs goes to its log.
    faulthandler.dump_traceback_later(120, exit=True)
    import cpu

    warnings.filterwarnings("ignore")
    cpu.install()
    import torch
    import torch.distributed as dist
    from launch import scenarios

    torch.set_num_threads(1)
    cpu.use_adam()
    dist.init_process_group("gloo")
    results = {}
    return dist.get_rank(), dist.get_world_size(), scenarios(results), results


def failing(run):
    """What ``run`` raises on this rank: kind, text and seconds; of DCP's exception the errors by rank."""
    from torch.distributed.checkpoint import CheckpointException

    began, found = time.monotonic(), {"kind": None, "text": ""}
    try:
        run()
    except CheckpointException as error:
        inner = {str(rank): type(of).__name__ for rank, (of, _) in error.failures.items()}
        found = {"kind": "CheckpointException", "text": str(error), "failures": inner}
    except Exception as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    return {**found, "seconds": time.monotonic() - began}


def plain(step, rank, world_size, width=3, **more):
    """A small state with one sharded tensor; ``more`` goes to the common state."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    data = torch.full((4, width), float(step * 10 + rank))
    return {"t": ShardedTensor.from_rank_offsets("t", data, (0, rank, world_size)), "iteration": step, **more}


def uneven(step, rank, world_size, width, **more):
    """The same, with a tensor of this rank's own: another ``width`` on one rank changes that rank's plan alone."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    state = plain(step, rank, world_size, **more)
    data = torch.full((2, width), float(step * 100 + rank))
    return {**state, f"own.{rank}": ShardedTensor.from_rank_offsets(f"own.{rank}", data)}


def own_of(state, rank):
    return [state["t"][0].tolist()[0], state[f"own.{rank}"].tolist()[0]]
