"""Opens the memory store of each base container once per process; savers and loaders that share it share the stores."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from mlflashpoint.core import lifeline
from mlflashpoint.core.channel import Store
from mlflashpoint.core.checkpoint_id_types import CheckpointContainerId
from mlflashpoint.core.onlooker import Onlooker
from mlflashpoint.core.ranks import Ranks, ranks_from
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import ContainerError, StoreClosedError
from mlflashpoint.settings import StoreConfig

log = logging.getLogger("mlflashpoint.core")

#: loads before the first save that are remembered
_KEPT = 64


class CheckpointObjectManager:
    """The open memory stores of this process, by base container.

    Args:
        group: name of the set of ranks that save together. The ids of a named group's versions are
            ``<base container>/<group>/step-<n>_ckpt``.
        store: the job's c10d store; None takes that of torch.distributed.
        settings: fields of StoreConfig, which go before the environment. Without a ``job_id`` the job is named by
            MLFLASHPOINT_JOB_ID or, that unset, by the last segment of the base container: it has to be unique to the
            job and the same after a restart.

    All managers of a process mean the same stores. Pickling one gives the stores up to the process that unpickles it:
    that is how a checkpoint process takes over from the training process.
    """

    def __init__(self, *, group: str = "default", store: Store | None = None, **settings: Any) -> None:
        self.group = group
        self.settings = settings
        self._store = store
        self._lock = threading.Lock()
        self._runtimes = _open_here.setdefault(group, {})
        #: steps of a base container that training may have come from: those loaded, and from the first save on the last
        #: one saved
        self._reached: dict[str, tuple[int, ...]] = {}
        self._saved: set[str] = set()
        self._gave_up = False
        self._given: Runtime | None = None
        #: closed, and kept for what they still do on SIGTERM
        self._handed_over: dict[str, Runtime] = {}
        self._onlookers: dict[str, Onlooker] = {}

    @classmethod
    def around(cls, runtime: Runtime) -> CheckpointObjectManager:
        """A manager of a store that is open already; no other one takes its place, also when it has been closed."""
        manager = cls(group=runtime.group, job_id=runtime.config.job_id)
        base = CheckpointContainerId(str(runtime.config.base_container))
        if manager.opened(base) is None:
            manager._runtimes[base] = runtime
        manager._given = runtime
        return manager

    def runtime(self, base_container: str, ranks: Ranks | None = None) -> Runtime:
        """The store of ``base_container``, opened at the first call.

        Args:
            base_container: absolute path.
            ranks: who this process is; None asks torch.distributed and the environment.

        Raises:
            ContainerError: this process gave the store up to a checkpoint process.
            StoreClosedError: it is the store that this manager is around, and was closed.
            RankUnknownError, SettingError, StoreInUseError: as ``Runtime.from_env``.
        """
        base = CheckpointContainerId(base_container)
        with self._lock:
            if self._gave_up:
                raise ContainerError(
                    "the memory store belongs to the checkpoint process of dcp.async_save",
                    path=base,
                    remedy="make all saves of this process with AsyncCheckpointerType.PROCESS, or none",
                )
            runtime = self._known(base)
            if runtime is not None and runtime.closed and runtime is self._given:
                raise StoreClosedError("the store is closed", path=base, remedy="make a new one")
            if runtime is None or runtime.closed:
                runtime = self._runtimes[base] = self._open(base, ranks or ranks_from(os.environ))
            return runtime

    def opened(self, base_container: str) -> Runtime | None:
        """The store of ``base_container`` if this process has it open."""
        runtime = self._known(CheckpointContainerId(base_container))
        return None if runtime is None or runtime.closed else runtime

    def gave_up(self) -> bool:
        """Whether a checkpoint process has the stores now."""
        return self._gave_up

    def onlooker(self, base_container: str, ranks: Ranks | None = None) -> Onlooker:
        """What finds and reads in ``base_container`` for this process, which gave the store up.

        Args:
            base_container: absolute path.
            ranks: who this process is, unless the store that it gave up tells; None as for ``runtime``.

        Raises:
            RankUnknownError, SettingError: as ``Runtime.from_env``.
        """
        base = CheckpointContainerId(base_container)
        with self._lock:
            found = self._onlookers.get(base)
            if found is None:
                config, before = self._config(base), self._handed_over.get(base)
                if before is not None:
                    config, ranks = before.config, Ranks(before.rank, before.world_size, before.local_rank)
                found = Onlooker(config, ranks or ranks_from(os.environ), self.group, self._store)
                self._onlookers[base] = found
            return found

    def reached(self, base_container: str, step: int, *, resumed: bool = False) -> None:
        """Training has reached ``step``: by a save, or perhaps (``resumed``) by going on from what was loaded.

        Which of those that were loaded it is, the first save tells; what is loaded after that does not count.
        """
        base = CheckpointContainerId(base_container)
        with self._lock:
            runtime = self._known(base)
            if not resumed:
                self._saved.add(base)
                self._reached[base] = (step,)
            elif base not in self._saved and not self._gave_up:
                self._reached[base] = (*self._reached.get(base, ()), step)[-_KEPT:]
                if runtime is not None:
                    runtime.loaded(step)

    def look_away(self) -> None:
        """End the reading beside a checkpoint process, until the next ``onlooker``."""
        with self._lock:
            self._look_away()

    def close(self) -> None:
        """Finish background work and close the stores."""
        with self._lock:
            for runtime in self._runtimes.values():
                runtime.close()
            for runtime in self._handed_over.values():
                runtime.close()
            self._look_away()
            self._runtimes.clear()

    def _look_away(self) -> None:
        while self._onlookers:
            self._onlookers.popitem()[1].close()

    def _known(self, base: CheckpointContainerId) -> Runtime | None:
        given = self._given
        return given if given is not None and str(given.config.base_container) == base else self._runtimes.get(base)

    def _open(self, base: CheckpointContainerId, ranks: Ranks) -> Runtime:
        runtime = Runtime(
            self._config(base),
            rank=ranks.rank,
            world_size=ranks.world_size,
            local_rank=ranks.local_rank,
            store=self._store,
            group=self.group,
        )
        # A checkpoint process starts where the training process stood, and abandons nothing below.
        for step in self._reached.get(base, ()):
            runtime.loaded(step)
        return runtime

    def _config(self, base: CheckpointContainerId) -> StoreConfig:
        settings = dict(self.settings)
        settings.setdefault("job_id", os.environ.get("MLFLASHPOINT_JOB_ID") or base.name)
        return StoreConfig.from_env(**{**settings, "base_container": Path(base)})

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            for onlooker in self._onlookers.values():
                onlooker.save_begins()
            settings = dict(self.settings)
            given = {} if self._given is None else {str(self._given.config.base_container): self._given}
            for base, runtime in {**self._runtimes, **given}.items():
                log.info("the memory store %s goes to the checkpoint process", base)
                settings = {**vars(runtime.config), **settings}
                settings.pop("base_container")
                if not runtime.closed:
                    runtime.hand_over()
                    self._handed_over[base] = runtime
            self.settings = settings
            self._runtimes.clear()
            self._gave_up = True
            return {"group": self.group, "settings": settings, "reached": dict(self._reached)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(group=state["group"], **state["settings"])  # type: ignore[misc]
        self._reached.update(state["reached"])
        lifeline.hold()


#: the open stores of this process, by group and base container
_open_here: dict[str, dict[str, Runtime]] = {}
