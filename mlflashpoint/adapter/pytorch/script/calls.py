"""What a script's call of ``dcp.save``, ``async_save`` or ``load`` asks for, and whether it is one for us.

For us is what every rank of the job calls together, with a folder on a file system, from the script itself. A call that
comes out of a framework is that framework's, and one out of DCP itself (the thread of ``async_save``) was seen before.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful

#: packages whose calls of DCP are a part of their own checkpoints
_FRAMEWORKS = frozenset(
    {"lightning", "lightning_fabric", "megatron", "nemo", "nemo_rl", "nvidia_resiliency_ext", "pytorch_lightning"}
)
_OURS = ("mlflashpoint.agent.", *(f"{__name__.rpartition('.')[0]}.{name}" for name in ("calls", "saves", "loads")))


@dataclass(frozen=True)
class Request:
    """One call for us.

    Attributes:
        state: the script's state dict.
        path: folder of the checkpoint, absolute, links resolved.
        planner: the script's planner, None for DCP's default.
        alone: there is no process group, and this process is the whole job.
    """

    state: Mapping[str, Any]
    path: Path
    planner: Any
    alone: bool

    def plain_state(self) -> tuple[dict[str, Any], BaseException | None]:
        """The state with each Stateful object asked for its own, as DCP does at the beginning, and what that raised.

        That is the script's own, and the other ranks have to hear of it before it is raised here.
        """
        plain: dict[str, Any] = {}
        try:
            for key, value in self.state.items():
                plain[key] = value.state_dict() if isinstance(value, Stateful) else value
        except BaseException as error:
            return plain, error
        return plain, None

    def take(self, plain: Mapping[str, Any]) -> None:
        """Give what was loaded to the script, as DCP does at the end of a load."""
        state: Any = self.state
        for key in sorted(plain):
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(plain[key])
            else:
                state[key] = plain[key]


def request(args: tuple[Any, ...], kwargs: Mapping[str, Any], storage: str) -> Request | str:
    """The call as a request, or why it is none of ours.

    Args:
        args: the call's arguments by position.
        kwargs: its keywords.
        storage: name of the argument that holds the storage, ``storage_writer`` or ``storage_reader``.
    """
    caller = _foreign_caller()
    if caller is not None:
        return f"it comes from {caller}"
    if len(args) > 1 or (not args and "state_dict" not in kwargs):
        return "its arguments are unknown"
    if kwargs.get("process_group") not in (None, _world()):
        return "it is of a process group of its own"
    if kwargs.get("use_collectives", True) is not True:
        return "it does without collectives"
    alone = not (dist.is_available() and dist.is_initialized())
    if alone and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "the job has several ranks and no process group"
    if kwargs.get("no_dist") and not alone and dist.get_world_size() > 1:
        return "each rank calls for itself (no_dist)"
    given, where = kwargs.get(storage), kwargs.get("checkpoint_id")
    if given is not None:
        if type(given) not in (FileSystemWriter, FileSystemReader):
            return f"it has a {type(given).__name__}"
        where = where if where is not None else given.path
    if not isinstance(where, (str, os.PathLike)) or re.match(r"\w+:/", os.fspath(where)):
        return "it names no folder on a file system"
    state = args[0] if args else kwargs["state_dict"]
    return Request(state, Path(os.path.realpath(where)), kwargs.get("planner"), alone)


def _world() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _foreign_caller() -> str | None:
    """The module of a framework, or of DCP itself, that the call comes out of."""
    frame = sys._getframe(1)
    ours = True
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        ours = ours and name.startswith(_OURS)
        if not ours:
            package = name.partition(".")[0]
            if package in _FRAMEWORKS or package == "mlflashpoint" or name.startswith("torch.distributed.checkpoint"):
                return str(name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def trouble(error: BaseException | None) -> str:
    """What the other ranks are told of ``error``."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def told(error: CheckpointException) -> str:
    """``error`` in one line, where DCP's text has each rank's traceback."""
    return "; ".join(f"rank {rank}: {type(of).__name__}: {of}" for rank, (of, _) in sorted(error.failures.items()))


def elsewhere(what: str, rank: int, text: str) -> CheckpointException:
    """What DCP raises on the other ranks if one fails within a save or load."""
    return CheckpointException(what, {rank: (RuntimeError(text), traceback.StackSummary())})
