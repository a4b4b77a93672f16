"""The memory store of one stream of checkpoints: those that one line of a script saves, under changing numbers.

A script may save its model and its optimizer apart, to two folders per step. Each stream has a store of its own, so
that none takes the place of the other's versions. Versions are numbered by their order, because a path need not hold
the step; which folder a version belongs to is kept in its shards.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.adapter.pytorch.script.journal import Journal
from mlflashpoint.adapter.pytorch.shards import Shards
from mlflashpoint.adapter.pytorch.store import MemoryStore
from mlflashpoint.core.channel import Channel
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.ledger import agree
from mlflashpoint.core.ranks import Ranks, ranks_from
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import FlashpointError, NoVersionError, PeerError
from mlflashpoint.settings import BY_NAME, StoreConfig

log = logging.getLogger("mlflashpoint.adapter")

SIDE_FILE = "script.json"
#: stores of this process; a script that names its folders at random would else fill the node's memory
_MOST = 4
#: versions before the newest that are looked at for a folder
_BACK = 3

_streams: dict[str, Stream | None] = {}
_votes = 0


class Stream:
    """One stream's store, opened on all ranks together.

    Attributes:
        store: the store.
        number: number of the last save, of this start or of the one before; -1 if there was none.
        last_durable: folder of the last durable checkpoint that this job knows of, None before the first.
        since_durable: checkpoints in memory only since then.
        newest_is_memory: folder of the last save if that is in memory only.
        has_saved: this start has saved; what it loads from then on is no resume.
        journal: of the durable checkpoints beside the versions; rank 0's is kept.
    """

    def __init__(self, pattern: str, alone: bool) -> None:
        config = StoreConfig.from_env()
        group = f"dcp-{hashlib.sha256(pattern.encode()).hexdigest()[:12]}"
        ranks = Ranks(0, 1, 0) if alone else ranks_from(os.environ)
        self.store = MemoryStore(
            Runtime(config, rank=ranks.rank, world_size=ranks.world_size, local_rank=ranks.local_rank, group=group)
        )
        self.number = -1
        self.last_durable: Path | None = None
        self.since_durable = 0
        self.newest_is_memory: Path | None = None
        self.has_saved = False
        self.journal = Journal(self.store.runtime)
        self._process_group: Any = None
        self._planner: StructureSavePlanner | None = None
        self._told = 0
        if self.runtime.problem is not None:
            raise self.runtime.problem

    @property
    def runtime(self) -> Runtime:
        return self.store.runtime

    def connect(self) -> None:
        """Make the process group that memory saves and loads talk in; collective.

        The job's own would do, but for the thread of ``async_save``, which talks in it at times of its own.
        """
        if self.runtime.world_size > 1:
            timeout = datetime.timedelta(seconds=self.runtime.config.deadline_s)
            self._process_group = dist.new_group(backend="gloo", timeout=timeout)

    def find(self) -> dict[Path, CheckpointContainerId]:
        """The folders whose checkpoints can be loaded from memory, and which version each is; collective.

        The newest version may be pieced together from several nodes; older ones count only where a node has them whole.
        """
        newest = self.store.latest()
        if newest is None or newest.step is None:
            return {}
        self.number = max(self.number, newest.step)
        found: dict[Path, CheckpointContainerId] = {}
        for number in range(newest.step, max(-1, newest.step - 1 - _BACK), -1):
            version = self.store.version(number)
            folder = self._folder_of(version, number == newest.step)
            if self.vote(folder is not None) and folder is not None:
                found.setdefault(folder, version)
        return found

    def _folder_of(self, version: CheckpointContainerId, is_newest: bool) -> Path | None:
        try:
            if is_newest:
                reader = self.store.reader
                reader.reset(version)
                content = reader.shards().side_file(reader.nearest_rank(), SIDE_FILE)
                reader.close()
            else:
                shards = Shards.on_node(version, self.runtime.group)
                content = shards.side_file(self.runtime.rank % shards.world_size, SIDE_FILE)
                shards.close()
            return None if content is None else Path(json.loads(content)["folder"])
        except NoVersionError:
            return None
        except (FlashpointError, ValueError, KeyError, TypeError) as error:
            log.warning("the version %s is left out: %s", version, error)
            return None

    def save(self, state: Mapping[str, Any], folder: Path, planner: Any, *, wait: bool) -> Metadata | None:
        """Store a checkpoint in memory; collective.

        Returns:
            its metadata; None if it failed, or with ``wait`` if this rank has not committed it. Raises nothing: DCP
            has told all ranks.
        """
        self.number += 1
        self.has_saved = True
        number = self.number
        writer = self.store.writer
        writer.side_files = {SIDE_FILE: json.dumps({"folder": str(folder)}).encode()}
        metadata: Metadata
        try:
            with _quiet():
                metadata = state_dict_saver.save(
                    dict(state),
                    checkpoint_id=self.store.version(number),
                    storage_writer=writer,
                    planner=self._planner_for(planner),
                    process_group=self._process_group,
                )
            if wait and not (self.runtime.flush() and self.runtime.stats()["last_committed_step"] == number):
                return None
            return metadata
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            log.error("the memory save %d (%s) failed: %s", number, folder, error)
            return None

    def load(self, state: dict[str, Any], version: CheckpointContainerId, planner: Any) -> None:
        """Load a version that ``find`` has found into ``state``; collective, and raises as ``dcp.load`` does."""
        with _quiet():
            state_dict_loader.load(
                state,
                checkpoint_id=version,
                storage_reader=self.store.reader,
                planner=planner,
                process_group=self._process_group,
            )

    def write_durable(self, folder: Path, planner: Any) -> None:
        """A durable save of what ``planner`` plans; collective, and raises as ``dcp.save`` does."""
        with _quiet():
            state_dict_saver.save({}, checkpoint_id=folder, planner=planner, process_group=self._process_group)

    def vote(self, ok: bool) -> bool:
        """Whether every rank says ``ok``; collective."""
        self._told += 1
        return self.runtime.agree(f"script/vote/{self._told}", ok)

    def tell(self, value: Any) -> Any:
        """Rank 0's ``value``, which JSON can hold, on every rank; collective.

        Raises:
            PeerError: it did not get there, on any rank.
        """
        if self.runtime.world_size == 1:
            return value
        self._told += 1
        channel, key = self.runtime.channel("script").under("script"), f"told/{self._told}"
        if self.runtime.rank == 0:
            channel.post(key, value)
        if not self.vote(True):
            raise PeerError("the ranks could not hear rank 0's decision", rank=self.runtime.rank)
        return channel.read(key)

    def _planner_for(self, given: Any) -> Any:
        if given is not None and type(given) is not DefaultSavePlanner:
            return given
        flags = {
            name: getattr(given, name)
            for name in ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank")
            if hasattr(given, name)
        }
        if self._planner is None or any(getattr(self._planner, name, None) != flags[name] for name in flags):
            self._planner = StructureSavePlanner(**flags)
        return self._planner


def stream_of(pattern: str, alone: bool) -> Stream | None:
    """The stream of ``pattern``, opened at the first call, on all ranks or on none; None if it can't be.

    Collective. What goes wrong on one rank alone is learnt by all, so that none waits for it later.
    """
    if pattern in _streams:
        return _streams[pattern]
    if sum(stream.has_saved for stream in open_streams()) >= _MOST:
        log.warning("checkpoints %s are left alone: the script has %d lines of them already", pattern, _MOST)
        _streams[pattern] = None
        return None
    stream: Stream | None = None
    try:
        stream = Stream(pattern, alone)
    except Exception as error:
        log.error("checkpoints %s do not go to memory: %s", pattern, error)
    if not all_say(stream is not None) or not all_say(stream is not None and _connected(stream)):
        if stream is not None:
            log.error("checkpoints %s do not go to memory: another rank can't", pattern)
            stream.store.close()
        stream = None
    _streams[pattern] = stream
    return stream


def open_streams() -> list[Stream]:
    """The streams of this process, in the order in which they were opened."""
    return [stream for stream in _streams.values() if stream is not None]


def forget_streams() -> None:
    """Close them all: the process group that they are of goes away."""
    for stream in open_streams():
        stream.store.close()
    _streams.clear()


def _connected(stream: Stream) -> bool:
    try:
        stream.connect()
        return True
    except Exception as error:
        log.error("memory saves have no process group: %s", error)
        return False


def all_say(ok: bool, seconds: float | None = None) -> bool:
    """``Stream.vote`` for ranks that may have no store; waits ``seconds``, None for the setting ``deadline_s``."""
    global _votes
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ok
    _votes += 1
    try:
        deadline = Deadline(BY_NAME["deadline_s"].read(os.environ) if seconds is None else seconds)
        channel = Channel(dist.distributed_c10d._get_default_store(), f"mlflashpoint/script/{_votes}")
        return agree(channel, ok, rank=dist.get_rank(), world_size=dist.get_world_size(), deadline=deadline)[0]
    except FlashpointError as error:
        log.error("the ranks could not agree: %s", error)
        return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that there is no process group, which the script's own call gives already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
