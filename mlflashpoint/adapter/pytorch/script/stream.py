"""The memory store of one stream of checkpoints: those of one line of a script's, under changing numbers.

A script may save its model and its optimizer apart, to two folders per step. Each stream has a store of its own, so
that none takes the place of the other's versions. Versions are numbered by their order, because a path need not hold
the step; a version's shards hold the token by which the folder of a checkpoint in memory only names it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.adapter.pytorch.script.calls import told
from mlflashpoint.adapter.pytorch.script.council import hold
from mlflashpoint.adapter.pytorch.script.custody import Custody
from mlflashpoint.adapter.pytorch.script.journal import Journal
from mlflashpoint.adapter.pytorch.script.process_group import connected_group
from mlflashpoint.adapter.pytorch.script.uploads import Uploads
from mlflashpoint.adapter.pytorch.shards import Shards
from mlflashpoint.adapter.pytorch.store import MemoryStore
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import FlashpointError, NoVersionError, PeerError
from mlflashpoint.settings import StoreConfig

log = logging.getLogger("mlflashpoint.adapter")

SIDE_FILE = "script.json"
#: versions before the newest that are looked at for a folder
_BACK = 3


@dataclass(frozen=True)
class Version:
    """A version in memory: its number, the token in its shards, the folder that it was saved to, and its id."""

    number: int
    token: str
    folder: str
    id: CheckpointContainerId


class Stream:
    """One stream's store, opened on all ranks together.

    Args:
        group: the store's name, of ``line.group_of``.
        ranks: who this process is.

    Attributes:
        store: the store.
        number: number of the last save, of this start or of the one before; -1 if there was none.
        newest_is_memory: the last save is in memory only or, before the first one, something that was loaded.
        has_saved: this start has saved; what it loads from then on is no resume.
        has_loaded: this start has loaded from memory: that is not lost.
        broken: why the process group can't be used any more, empty while it can.
        warned: it was said that a save could not be kept in memory only.
        failing: the last memory save has failed, which was said.
        unseen: the last folder of rank 0's that another rank did not see, None if there was none.
        folders_are_shared: every rank sees the folders that rank 0 makes.
        journal: of the durable checkpoints beside the versions; rank 0's is kept.
        custody: of the folders; rank 0's counts.
        uploads: of the script's own; rank 0's count.

    Raises:
        FlashpointError: there is no store on this rank.
    """

    def __init__(self, group: str, ranks: Ranks) -> None:
        config = StoreConfig.from_env()
        self.store = MemoryStore(
            Runtime(config, rank=ranks.rank, world_size=ranks.world_size, local_rank=ranks.local_rank, group=group)
        )
        self.number = -1
        self.newest_is_memory = False
        self.has_saved = False
        self.has_loaded = False
        self.broken = ""
        self.warned = False
        self.failing = False
        self.unseen: Path | None = None
        self.folders_are_shared = False
        self.journal = Journal(self.store.runtime)
        self.custody = Custody(config.job_id, group, self.journal)
        self.uploads = Uploads()
        self._process_group: Any = None
        self._planner: StructureSavePlanner | None = None
        problem = self.runtime.problem
        if problem is not None:
            # It would keep its place, and the next try would find that taken.
            self.store.close()
            # The log has the remedy already.
            raise type(problem)(problem.message) from problem

    @property
    def runtime(self) -> Runtime:
        return self.store.runtime

    def connect(self, name: str, seconds: float) -> None:
        """Make the process group that memory saves and loads talk in; collective, and raises as its maker does.

        The job's own would do, but for the thread of ``async_save``, which talks in it at times of its own.

        Args:
            name: of the group, equal on all ranks and new.
            seconds: longest time that it may take.
        """
        if self.runtime.world_size > 1:
            self._process_group = connected_group(name, connect_s=seconds, timeout_s=self.runtime.config.deadline_s)

    def find(self) -> list[Version]:
        """The versions that can be loaded, the newest first; collective, and raises FlashpointError on every rank.

        The newest version may be pieced together from several nodes; older ones count only where a node has them whole.
        """
        newest = self.store.latest()
        if newest is None or newest.step is None:
            return []
        self.number = max(self.number, newest.step)
        found: list[Version] = []
        for number in range(newest.step, max(-1, newest.step - 1 - _BACK), -1):
            version = self._version(number, number == newest.step)
            outcome = hold(trouble="" if version is not None else "it has no such version")
            if outcome.rank == -1:
                raise PeerError(f"the ranks did not come together: {outcome.trouble}", rank=self.runtime.rank)
            if outcome.ok and version is not None:
                found.append(version)
        return found

    def _version(self, number: int, is_newest: bool) -> Version | None:
        version = self.store.version(number)
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
            if content is None:
                return None
            said = json.loads(content)
            return Version(number, str(said["token"]), str(said.get("folder", "")), version)
        except NoVersionError:
            return None
        except (FlashpointError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the version %s is left out: %s", version, error)
            return None

    def save(self, state: Mapping[str, Any], token: str, folder: Path, planner: Any, *, wait: bool) -> Metadata | None:
        """Store the checkpoint of ``folder`` in memory, where it is known again by ``token``; collective.

        Returns:
            its metadata; None if it failed, or with ``wait`` if this rank has not committed it. Raises nothing: DCP
            has told all ranks.
        """
        self.number += 1
        self.has_saved = True
        number = self.number
        writer = self.store.writer
        writer.side_files = {SIDE_FILE: json.dumps({"token": token, "folder": str(folder)}).encode()}
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
            self.failing = False
            return metadata
        except CheckpointException as error:
            # The first of a row is news.
            log.log(
                logging.DEBUG if self.failing else logging.ERROR, "the memory save %d failed: %s", number, told(error)
            )
            self.failing = True
            return None
        except Exception as error:
            # The others may still wait in the process group, which is of no use any more.
            self.broken = f"the memory save {number} failed: {type(error).__name__}: {error}"
            log.error(self.broken)
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warnings that mean the script's own call, and not ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
