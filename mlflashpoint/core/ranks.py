"""Who this process is: its global rank, the world size and its local rank. Never guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mlflashpoint.errors import RankUnknownError

#: where launchers put the local rank, first hit wins
_LOCAL_RANK_SOURCES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
#: ranks that a text names
_NAMED = 16


@dataclass(frozen=True)
class Ranks:
    """Global rank and world size, and the rank among the processes of this node.

    Raises:
        RankUnknownError: if they contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.local_rank < 0:
            raise RankUnknownError(
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} can't be",
                remedy="correct RANK, WORLD_SIZE and LOCAL_RANK",
            )


def named(ranks: Sequence[int], most: int = _NAMED) -> str:
    """The ranks as a text names them, ``most`` of many."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def ranks_from(environ: Mapping[str, str]) -> Ranks:
    """From torch.distributed if the job has initialised it, else from RANK, WORLD_SIZE and LOCAL_RANK.

    Raises:
        RankUnknownError: neither tells, or a variable is no number.
    """
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    for variable in _LOCAL_RANK_SOURCES:
        if variable in environ:
            return Ranks(rank, world_size, _number(environ, variable))
    if world_size == 1:
        return Ranks(rank, world_size, 0)
    raise RankUnknownError(
        "the local rank is unknown", setting="LOCAL_RANK", rank=rank, remedy="start the job with torchrun, or set it"
    )


def _number(environ: Mapping[str, str], variable: str) -> int:
    text = environ.get(variable, "").strip()
    if not text:
        raise RankUnknownError(
            "this process's rank is unknown, and it is not taken for rank 0",
            setting=variable,
            remedy="initialise torch.distributed first, or start the job with torchrun (RANK, WORLD_SIZE, LOCAL_RANK)",
        )
    if not text.isdigit():
        raise RankUnknownError("not a rank or size", setting=variable, value=text, remedy="set a whole number from 0")
    return int(text)
