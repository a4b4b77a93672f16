"""Megatron-Core's save strategy on the memory store."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from mlflashpoint.adapter.megatron import folder
from mlflashpoint.adapter.megatron.planning import PlannedWrite, SavePlanning
from mlflashpoint.adapter.megatron.readiness import all_ready
from mlflashpoint.adapter.megatron.topology import current_topology
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.core.container import read_container
from mlflashpoint.core.manifest import node_copies
from mlflashpoint.core.node_versions import split_version
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import StateTypeError

__all__ = ["MLFlashpointMegatronAsyncSaveStrategy"]

#: key under which Megatron-Core from 0.19 on puts the common state among the sharded ones
_COMMON_KEY = "common_state"


class MLFlashpointMegatronAsyncSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves the sharded part of a Megatron checkpoint into memory; for ``dist_checkpointing.save``.

    Blocking, also for an async save, is the copy of this rank's data; nothing is left for the async process to do. The
    version counts once the request was finalized on all ranks.

    Args:
        storage_writer: where to.
        use_cached_ckpt_structure: keep the plan once it came out equal twice; it is compared with each state.
        keep_only_main_replica: leave it to Megatron-Core which rank saves what is replicated.

    Raises (from ``save`` and from the request's finalizing, on all ranks): CheckpointException with the error of each
    rank that failed: StoreFullError, StateTypeError, SlotBusyError, ContainerError.
    """

    def __init__(
        self,
        storage_writer: MemoryStorageWriter,
        use_cached_ckpt_structure: bool = False,
        keep_only_main_replica: bool = True,
    ) -> None:
        known = inspect.signature(TorchDistSaveShardedStrategy.__init__).parameters
        options = {"backend": "torch_dist", "version": 1, "keep_only_main_replica": keep_only_main_replica}
        super().__init__(**{name: value for name, value in options.items() if name in known})
        self.storage_writer = storage_writer
        self.use_cached_ckpt_structure = use_cached_ckpt_structure
        self._planning = SavePlanning(keep_plan=use_cached_ckpt_structure)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Stage the state; returns Megatron-Core's (or NVRx's) request, whose finalizing makes the version final.

        Raises:
            CheckpointIdError: ``checkpoint_dir`` is no version's container; on all ranks.
            ContainerError: this rank has no memory store. On the other ranks PeerError with its text.
            StateTypeError: an object can't be serialised; likewise.
        """
        finalize = self._begin(sharded_state_dict, checkpoint_dir)
        # A request without a function would never be seen to end by a persistent async process.
        return _request_kind(async_strategy)(int, (), [finalize])

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Stage the state and make the version final."""
        self._begin(sharded_state_dict, checkpoint_dir)()

    def _begin(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Callable[[], None]:
        writer = self.storage_writer
        writer.reset(checkpoint_dir)
        runtime = writer.runtime()
        writer.topology = current_topology()
        problem: Exception | None = runtime.problem
        state: dict[str, Any] = {}
        side_files: dict[str, bytes] = {}
        if problem is None:
            try:
                common = _take_common(sharded_state_dict)
                side_files = self._side_files(Path(checkpoint_dir), common)
                state = self._translated(sharded_state_dict)
            except Exception as error:
                problem = error
        all_ready(runtime, "save", problem)
        writer.side_files = side_files
        try:
            write = self._planning.plan(state, writer, runtime)
        finally:
            writer.side_files = {}
        version = str(checkpoint_dir)

        def finalize() -> None:
            self._finalize(write, runtime, version, side_files)

        return finalize

    def _translated(self, sharded_state_dict: Any) -> dict[str, Any]:
        """The state in DCP's terms; raises StateTypeError for an object that can't be serialised."""
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        try:
            translated: dict[str, Any] = mcore_to_pyt_state_dict(grouped, False)
        except Exception as error:
            raise _explained(error, grouped) from error
        return translated

    def _side_files(self, directory: Path, common: bytes | None) -> dict[str, bytes]:
        """What every rank's shard carries beside its data.

        The common state comes among the sharded ones, or from ``save_local_aware_megatron_checkpoint``, or
        Megatron-Core has written it on rank 0 before it called the strategy.
        """
        files = dict(self.storage_writer.side_files)
        if common is not None:
            files[folder.COMMON] = common
        elif folder.COMMON not in files and torch.distributed.get_rank() == 0:
            written = directory / folder.COMMON
            if written.is_file():
                files[folder.COMMON] = written.read_bytes()
        files.setdefault(folder.CONFIG, _config(self.backend, self.version))
        return files

    def _finalize(self, write: PlannedWrite, runtime: Runtime, version: str, files: dict[str, bytes]) -> None:
        write.finish()
        if runtime.local_rank == 0:
            folder.remove_folders(*_kept(runtime, version))
            # The configuration says that the folder is a checkpoint, so it is the last.
            ordered = sorted(files, key=lambda name: name == folder.CONFIG)
            folder.write_files(version, {name: files[name] for name in ordered})


def _take_common(sharded_state_dict: dict[str, Any]) -> bytes | None:
    """Take the common state out of the sharded ones, where Megatron-Core has put it there; every rank has it."""
    found = sharded_state_dict.get(_COMMON_KEY)
    if not isinstance(found, ShardedObject) or found.key != _COMMON_KEY:
        return None
    del sharded_state_dict[_COMMON_KEY]
    return serialised(found.data)


def _explained(error: Exception, grouped: Mapping[str, list[Any]]) -> Exception:
    """``error``, or which object it is that can't be serialised."""
    for key, parts in grouped.items():
        for part in parts:
            if isinstance(part, ShardedObject):
                try:
                    serialised(part.data)
                except Exception as reason:
                    kind = f"{type(part.data).__module__}.{type(part.data).__qualname__}"
                    return StateTypeError(
                        f"{key!r}, a {kind}, can't be serialised: {type(reason).__name__}: {reason}",
                        rank=torch.distributed.get_rank(),
                        remedy="leave it out, or register how to pickle its type (copyreg.pickle)",
                    )
    return error


def serialised(common_state: Any) -> bytes:
    """What Megatron-Core writes into ``common.pt``; raises what ``torch.save`` does."""
    buffer = io.BytesIO()
    torch.save(common_state, buffer)
    return buffer.getvalue()


def _config(backend: str, version: int) -> bytes:
    return json.dumps(dataclasses.asdict(CheckpointingConfig(backend, version))).encode()


def _kept(runtime: Runtime, version: str) -> tuple[Path, set[int]]:
    """The folder of the group's versions, and the steps that stay: of this version and of those with a shard here."""
    base, step = split_version(version, runtime.group)
    container = read_container(Path(base))
    copies = [] if container is None else node_copies(container, runtime.group, holder=runtime.rank)
    return Path(version).parent, {step, *(copy.record.step for copy in copies)}


def _request_kind(async_strategy: str) -> Any:
    if async_strategy == "nvrx":
        try:
            return importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core").AsyncRequest
        except ImportError:
            pass
    return AsyncRequest
