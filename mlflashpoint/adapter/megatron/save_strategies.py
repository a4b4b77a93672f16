"""Megatron-Core's save strategy on the memory store."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
from collections.abc import Callable, Iterator, Mapping
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
from mlflashpoint.adapter.megatron.planning import SavePlanning
from mlflashpoint.adapter.megatron.readiness import all_ready, name_of
from mlflashpoint.adapter.megatron.topology import current_topology
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.core.checkpoint_saver import deadline_of
from mlflashpoint.core.container import read_container
from mlflashpoint.core.manifest import node_copies
from mlflashpoint.core.nesting import too_deep
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
    rank that could not write: StoreFullError, SlotBusyError. ContainerError, if a node's folder of the version can't be
    written. DeadlineExceededError, if a rank does not come to finalize.
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
        self._common: bytes | None = None

    @contextlib.contextmanager
    def with_common(self, content: bytes) -> Iterator[None]:
        """Inside, a save stores this common state with every rank; Megatron-Core's wrappers pass nothing on."""
        self._common = content
        try:
            yield
        finally:
            self._common = None

    def deadline_s(self, version: object) -> float:
        """The deadline of the store that ``version`` lies in."""
        return deadline_of(self.storage_writer.stores, version)

    def name_of(self, version: object) -> str:
        """What all ranks call ``version``, wherever their nodes have it."""
        return name_of(self.storage_writer.stores, version)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Stage the state; returns Megatron-Core's (or NVRx's) request, whose finalizing makes the version final.

        Raises, on all ranks if one of them has reason to:
            CheckpointIdError: ``checkpoint_dir`` is no version's container.
            ContainerError: a rank has no memory store.
            StateTypeError: an object, or the common state, can't be serialised.
            StepError: the ranks save different steps.
            DeadlineExceededError: a rank does not come.
        """
        finalize = self._begin(sharded_state_dict, checkpoint_dir)
        # A request without a function would never be seen to end by a persistent async process.
        return _request_kind(async_strategy)(int, (), [finalize])

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Stage the state and make the version final."""
        self._begin(sharded_state_dict, checkpoint_dir)()

    def _begin(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Callable[[], None]:
        writer, deadline_s = self.storage_writer, self.deadline_s(checkpoint_dir)
        name = self.name_of(checkpoint_dir)
        problem: Exception | None = None
        state: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        try:
            writer.reset(checkpoint_dir)
            problem = writer.runtime().problem
            if problem is None:
                writer.topology = current_topology()
                files = self._files(Path(checkpoint_dir), _take_common(sharded_state_dict))
                state = self._translated(sharded_state_dict)
        except RecursionError:
            problem = too_deep(sharded_state_dict)
        except Exception as error:
            problem = error
        fits = problem is None and self._planning.fits(state)
        again = all_ready("save", problem, vote=fits, version=name, deadline_s=deadline_s)
        of_the_owner = writer.side_files
        writer.side_files = {**of_the_owner, **files}
        try:
            write = self._planning.plan(state, writer, again=again, version=name, deadline_s=deadline_s)
        finally:
            writer.side_files = of_the_owner
        runtime, version = writer.runtime(), str(checkpoint_dir)

        def finalize() -> None:
            write.finish(deadline_s)
            all_ready("folder", _written(runtime, version, files), version=name, deadline_s=deadline_s)

        return finalize

    def _translated(self, sharded_state_dict: Any) -> dict[str, Any]:
        """The state in DCP's terms; raises StateTypeError for an object that can't be serialised."""
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        try:
            translated: dict[str, Any] = mcore_to_pyt_state_dict(grouped, False)
        except Exception as error:
            raise _explained(error, grouped) from error
        return translated

    def _files(self, directory: Path, common: bytes | None) -> dict[str, bytes]:
        """What of the version's folder this rank's shard carries.

        The common state comes among the sharded ones, or from ``save_local_aware_megatron_checkpoint``, or
        Megatron-Core has written it on rank 0 before it called the strategy.
        """
        common = self._common if common is None else common
        if common is None and torch.distributed.get_rank() == 0:
            with contextlib.suppress(FileNotFoundError):
                common = (directory / folder.COMMON).read_bytes()
        config = _config(self.backend, self.version)
        return {folder.CONFIG: config} if common is None else {folder.COMMON: common, folder.CONFIG: config}


def _written(runtime: Runtime, version: str, files: Mapping[str, bytes]) -> Exception | None:
    """Write the version's folder on this node; what went wrong."""
    if runtime.local_rank == 0:
        try:
            folder.remove_folders(*_kept(runtime, version))
            # The configuration, which is the last, says that the folder is a checkpoint.
            folder.write_files(version, files)
        except Exception as error:
            return error
    return None


def _take_common(sharded_state_dict: dict[str, Any]) -> bytes | None:
    """Take the common state out of the sharded ones, where Megatron-Core has put it there; every rank has it.

    Raises StateTypeError.
    """
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
                    _pickled(part.data)
                except RecursionError:
                    return too_deep(part.data, root=repr(key))
                except Exception as reason:
                    return StateTypeError(
                        f"{key!r}, a {_kind(part.data)}, can't be serialised: {type(reason).__name__}: {reason}",
                        rank=torch.distributed.get_rank(),
                        remedy="leave it out, or register how to pickle its type (copyreg.pickle)",
                    )
    return error


def serialised(common_state: Any) -> bytes:
    """What Megatron-Core writes into ``common.pt``; raises StateTypeError, which names the entry that can't be."""
    try:
        return _pickled(common_state)
    except Exception as error:
        name, value, reason = "", common_state, error
        for key, entry in common_state.items() if isinstance(common_state, dict) else ():
            try:
                _pickled(entry)
            except Exception as of_the_entry:
                name, value, reason = f": {key!r}", entry, of_the_entry
                break
        if isinstance(reason, RecursionError):
            raise too_deep(common_state, root="the common state: ") from error
        raise StateTypeError(
            f"the common state can't be serialised{name}, a {_kind(value)}: {type(reason).__name__}: {reason}",
            rank=torch.distributed.get_rank(),
            remedy="leave it out, or register how to pickle its type (copyreg.pickle)",
        ) from error


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


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
