"""Looking for the version that all ranks can go on from, and loading this rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning.attempts import attempt, refuse
from mlflashpoint.adapter.lightning.found import FromMemory
from mlflashpoint.errors import FlashpointError, StateMismatchError, TopologyMismatchError

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.kinds import StateKind
    from mlflashpoint.core.recovery import Recovery
    from mlflashpoint.core.runtime import Runtime

_log = logging.getLogger(__name__)

_USABLE = "lightning/fits"


class Search:
    """One search in one store.

    Args:
        runtime: this rank's store.
        kind: how the strategy's state is put back.
        path_of: the virtual folder of a version.
        strict: raise why a version that was found can't be used.
        told: the fit's errors that the log has already; new ones are added.
    """

    def __init__(
        self, runtime: Runtime, kind: StateKind, path_of: Callable[[int], str], *, strict: bool, told: set[str]
    ) -> None:
        self._runtime = runtime
        self._kind = kind
        self._path_of = path_of
        self._strict = strict
        self._told = told
        #: step of the newest version that is newer than the durable checkpoint, whether it can be used or not
        self.seen: int | None = None

    def newest(self, trainer: Any, durable_step: int | None, durable: object) -> FromMemory | None:
        """The newest version that fits, checked by every rank; see ``FitSession.find``."""
        runtime = self._runtime
        try:
            recovery = runtime.find_latest(
                durable_step=durable_step, topology=self._kind.topology(trainer), reshard=self._kind.replicated
            )
        except FlashpointError:
            # Where this rank alone has failed, the others must not go on from what it can't.
            refuse(runtime, _USABLE)
            raise
        if recovery is None:
            if durable is None:
                _log.info(
                    "no version in memory to go on from, and no ckpt_path: files that the recipe has saved count only "
                    "if ckpt_path names them"
                )
            else:
                _log.info("nothing newer in memory than %s", _named(durable, durable_step))
            return None
        self.seen = recovery.step
        tried = attempt(
            runtime,
            _USABLE,
            f"loading step {recovery.step} from {recovery.place}",
            lambda: self._load(trainer, recovery),
        )
        found = tried.value
        if found is None:
            error = tried.error
            if error is not None and not isinstance(error, FlashpointError):
                error = StateMismatchError(f"the stored state can't be used: {error!r}", step=recovery.step)
            why = f"the memory version of step {recovery.step} is not used: {error or 'another rank cannot use it'}"
            # It is asked for again where the step of the recipe's own checkpoint shows only within the fit.
            level = logging.DEBUG if why in self._told else logging.ERROR
            self._told.add(why)
            _log.log(level, "%s; going on from %s", why, _named(durable, durable_step))
            if self._strict and error is not None:
                raise error
            return None
        _log.info(
            "going on from %s, step %d, not from %s: %s",
            recovery.place,
            recovery.step,
            _named(durable, durable_step),
            recovery.reason,
        )
        return found

    def _load(self, trainer: Any, recovery: Recovery) -> FromMemory:
        same = recovery.world_size == self._runtime.world_size
        if same:
            loaded = self._runtime.load(recovery)
            stored, attributes = loaded.state, loaded.attributes
        else:
            # A replicated state fits any number of ranks: those beyond the saved ones take a lower rank's.
            reader = self._runtime.load_shard(recovery, self._runtime.rank % recovery.world_size)
            try:
                stored, attributes = reader.state(), reader.attributes
            finally:
                reader.close()
        if recovery.topology != self._kind.topology(trainer):
            raise TopologyMismatchError(
                f"it was saved with layout {recovery.topology!r}, the job has {self._kind.topology(trainer)!r}",
                step=recovery.step,
                remedy="start the job with the strategy that saved it",
            )
        self._kind.check(trainer, stored["state"])
        path = self._path_of(recovery.step)
        return FromMemory(
            recovery.step,
            path,
            stored["state"],
            attributes,
            # what is each rank's own
            rng=stored["rng"] if same else None,
            logged=stored.get("logged") if same else None,
            tuned=stored.get("tuned", {}),
            hook=stored.get("hook"),
            place=recovery.place,
        )


def _named(durable: object, step: int | None) -> str:
    if durable is None:
        return "nothing: the recipe names no checkpoint"
    return f"{durable}" + ("" if step is None else f" of step {step}")
