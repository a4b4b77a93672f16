"""Megatron-Core's load strategy on the memory store."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.megatron import folder
from mlflashpoint.adapter.megatron.readiness import all_ready, name_of
from mlflashpoint.adapter.megatron.topology import current_topology
from mlflashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from mlflashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from mlflashpoint.core.checkpoint_saver import deadline_of
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, TopologyMismatchError

__all__ = ["MLFlashpointMegatronLoadStrategy"]

_swapping = threading.Lock()


class MLFlashpointMegatronLoadStrategy(mcore_torch.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads the sharded part of a Megatron checkpoint from memory; for ``dist_checkpointing.load``.

    Args:
        replication_manager: accepted for the guide's sake.
        checkpoint_loader: what finds versions; from now on it also puts the files on each node that Megatron-Core looks
            for before it asks a strategy.

    Any tensor and pipeline parallel size and any number of ranks can load a version, as far as Megatron-Core's own
    format allows it.

    Raises (from ``load``, on all ranks if one has reason to): TopologyMismatchError if the version was saved with
    another layout and can't be put together for this one; NoVersionError, ShardCorruptError, ShardFormatError;
    StepError if the ranks load different versions. What Megatron-Core itself raises is PeerError on the other ranks.
    """

    def __init__(
        self, replication_manager: Any = None, checkpoint_loader: DefaultMLFlashpointCheckpointLoader | None = None
    ) -> None:
        super().__init__()
        self.checkpoint_loader = (
            checkpoint_loader if checkpoint_loader is not None else DefaultMLFlashpointCheckpointLoader()
        )
        self.checkpoint_loader.when_found(self.make_ready)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        deadline_s = deadline_of(self.checkpoint_loader.stores, checkpoint_dir)
        name = name_of(self.checkpoint_loader.stores, checkpoint_dir)
        problem: BaseException | None = None
        result = None
        try:
            with self._reader(checkpoint_dir) as reader:
                # Not all that Megatron-Core asks of it comes to the other ranks' knowledge.
                reader.version_metadata()
        except Exception as error:
            problem = error
        all_ready("look", problem, version=name, deadline_s=deadline_s)
        reader = self._reader(checkpoint_dir)
        try:
            with _read_by(reader, deadline_s):
                result = super().load(sharded_state_dict, Path(checkpoint_dir), *args, **kwargs)
        except (Exception, CheckpointException) as error:
            problem = self._explained(error, reader)
        finally:
            reader.close()
        # Later releases of Megatron-Core load on each rank without hearing of the others.
        all_ready("load", problem, version=name, deadline_s=deadline_s)
        return result

    def make_ready(self, version: str) -> None:
        """Put the version's folder on this node, and see that it can be loaded from; collective.

        What ``get_latest_complete_checkpoint`` of the strategy's loader finds is made ready already. Call it before
        ``dist_checkpointing.load`` of any other version: that looks into the folder before it asks a strategy, and
        does not tell the other ranks what it finds.

        Raises, on all ranks if one has reason to:
            NoVersionError, ShardCorruptError, ContainerError, CheckpointIdError: its folder can't be made.
            StateTypeError: its common state can't be unpickled.
            StepError: the ranks name different versions.
        """
        problem: Exception | None = None
        try:
            with self._reader(version) as reader:
                reader.version_metadata()
                folder.restore_files(version, reader.shards(), reader.nearest_rank())
        except Exception as error:
            problem = error
        deadline_s = deadline_of(self.checkpoint_loader.stores, version)
        name = name_of(self.checkpoint_loader.stores, version)
        all_ready("folder-back", problem, version=name, deadline_s=deadline_s)

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
        if metadata is None:
            with self._reader(checkpoint_dir) as reader:
                metadata = reader.read_metadata()
        return super().load_tensors_metadata(Path(checkpoint_dir), metadata)

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        deadline_s = deadline_of(self.checkpoint_loader.stores, checkpoint_dir)
        with self._reader(checkpoint_dir) as reader, _read_by(reader, deadline_s):
            return super().load_sharded_metadata(Path(checkpoint_dir))

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        raise FlashpointError(
            "parts of a version in memory can't be removed", path=checkpoint_dir, remedy="save another version"
        )

    def _reader(self, checkpoint_dir: Any) -> MemoryStorageReader:
        return MemoryStorageReader(path=str(checkpoint_dir), checkpoint_loader=self.checkpoint_loader)

    def _explained(self, error: BaseException, reader: MemoryStorageReader) -> BaseException:
        """``error``; or our own one that DCP has raised it for; or that the layouts differ, if that lies behind it."""
        if isinstance(error, CheckpointException):
            for failure, _ in error.failures.values():
                if isinstance(failure, FlashpointError):
                    failure.__cause__ = error
                    return failure
        with contextlib.suppress(FlashpointError), reader:
            saved, present = reader.shards().topology, current_topology()
            if saved and present and saved != present and _is_a_mismatch(error):
                explained = TopologyMismatchError(
                    f"the version can't be resharded: saved with {saved}, the job has {present}: {_first_line(error)}",
                    step=reader.shards().step,
                    rank=dist.get_rank(),
                    remedy="start the job with the layout that saved it, or save in a format that can be resharded",
                )
                explained.__cause__ = error
                return explained
        return error


def _is_a_mismatch(error: BaseException) -> bool:
    if isinstance(error, CheckpointException):
        return any(_is_a_mismatch(failure) for failure, _ in error.failures.values())
    kinds = (CheckpointingException, KeyError, ValueError, AssertionError, RuntimeError)
    return isinstance(error, kinds) and not isinstance(error, FlashpointError)


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@contextlib.contextmanager
def _read_by(reader: MemoryStorageReader, deadline_s: float) -> Iterator[None]:
    """Inside, Megatron-Core's torch strategy reads by ``reader`` instead of from files.

    What it does around the reading differs from release to release (reformulated optimizer tensors, dequantizing while
    loading, collective or not); the function that makes its reader does not.
    """
    original = mcore_torch._get_filesystem_reader
    known = inspect.signature(original).parameters
    assert "checkpoint_dir" in known

    def ours(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        mine = str(checkpoint_dir) == str(reader.checkpoint_id)
        return reader if mine else original(checkpoint_dir, *args, **kwargs)

    if not _swapping.acquire(timeout=deadline_s):
        raise DeadlineExceededError(
            f"another thread of this process has not ended its load after {deadline_s:g} s",
            path=reader.checkpoint_id,
            setting="MLFLASHPOINT_DEADLINE_S",
        )
    try:
        mcore_torch._get_filesystem_reader = ours
        yield
    finally:
        mcore_torch._get_filesystem_reader = original
        _swapping.release()
