"""What stands in the place of a Megatron loop's local checkpoint manager: its saves go to the memory store.

The loop assembles and restores the state itself; this takes the tensor-aware state dict from it and gives it back. What
fails here fails on this rank alone and is reported by the store, which tells the other ranks: nothing here raises in
the middle of a save, and no collective of the loop's is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mlflashpoint.adapter.megatron_local import parameters
from mlflashpoint.adapter.megatron_local.fields import fields_set
from mlflashpoint.adapter.megatron_local.index import LocalCheckpointIndex, log
from mlflashpoint.adapter.megatron_local.tensor_aware import LocalShard, put_together
from mlflashpoint.core.runtime import SaveResult
from mlflashpoint.errors import NoVersionError, StateMismatchError, TopologyMismatchError


class LocalCheckpointManager(LocalCheckpointIndex):
    """Saves local checkpoints to memory and loads them; has the interface of NVRx's ``LocalCheckpointManager``."""

    #: outcome of the last save on this rank
    last_save: SaveResult | None = None
    _topology = ""
    _layout = ""
    _wait: bool | None = None
    #: read from memory and not handed to the loop yet; handed over; topology and layout that were stored with it
    _loaded: Any = None
    _used: Any = None
    _stored = ("", "")
    _told = False
    #: inside ``resuming``, which the agent and the library form may both enter
    _busy = False

    def learn(self, topology: Callable[[], str], model: Sequence[torch.nn.Module]) -> None:
        """Learn how the job is laid out, which is stored beside each shard; cheap after the first time.

        Args:
            topology: gives one readable line that is equal on all ranks, and for starts whose shards fit each other.
            model: the chunks of this rank's model.
        """
        if not self._layout:
            self._topology, self._layout = topology(), parameters.layout_of(model)

    def save(self, tensor_aware_state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Store this rank's shard; the state may be changed as soon as this returns.

        Returns:
            None, or for ``is_async`` Megatron-Core's request with nothing left to do: staging is over, and the store
            finishes in its own background.
        """
        self._loaded = self._used = None
        if self.runtime is not None:
            if not self._told:
                self._go_on_from(-1)
            self.last_save = self.runtime.save(
                LocalShard(tensor_aware_state_dict, self.folder),
                step=int(iteration),
                topology=self._topology,
                attributes={"layout": self._layout},
                wait=self._wait,
            )
        if not is_async:
            return None
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

        return AsyncRequest(None, (), [])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Saves inside return only when this rank's shard is committed, so that ``last_save`` is the whole truth."""
        before, self._wait, self.last_save = self._wait, True, None
        try:
            yield
        finally:
            self._wait = before

    def load(self) -> tuple[Any, tuple[int, int, str]]:
        """What ``find_latest`` found: the tensor-aware state dict, and ``(step, rank, group)`` as its name.

        Raises:
            NoVersionError: there is nothing to load.
            FlashpointError: it can't be read.
        """
        if self._loaded is None:
            self._read()
        self._used, self._loaded = self._loaded, None
        assert self.runtime is not None
        return self._used, (self.found, self.runtime.rank, self.runtime.group)

    @contextlib.contextmanager
    def resuming(
        self,
        topology: Callable[[], str],
        model: Sequence[torch.nn.Module],
        *,
        config: Any,
        overrides: Callable[[], Mapping[str, Any]],
        step: Callable[[], int],
        verify: bool = True,
    ) -> Iterator[None]:
        """Stands around the loop's load: makes sure of what is in memory first, and of the result last.

        Collective. If the version in memory does not fit on every rank, the loop finds nothing in memory and does what
        it does without us.

        Args:
            topology: as for ``learn``.
            model: the chunks of this rank's model.
            config: the checkpoint config that the loop reads.
            overrides: gives fields of it that have to differ for the loop to resume from memory.
            step: tells after the load from which step training goes on.
            verify: whether the loop leaves the parameters as they were stored.
        """
        if self._busy or self.runtime is None:
            yield
            return
        self._busy = True
        try:
            with fields_set(config, overrides() if self._fits(topology, model) else {}):
                yield
            self._go_on_from(step())
            if verify:
                self._verify(model)
        finally:
            self._loaded = self._used = None
            self._busy = False

    def _fits(self, topology: Callable[[], str], model: Sequence[torch.nn.Module]) -> bool:
        """Whether every rank can load what was found; if not, all of them drop it."""
        step = self.find_latest()
        if step == -1 or self.runtime is None:
            return False
        problem: Exception | None = None
        try:
            self.learn(topology, model)
            self._read()
            self._compare(model)
        except Exception as error:
            problem = error
            log.error("the memory version of step %d can't be loaded on this rank: %s", step, error)
        if self.runtime.agree(f"local/resume/{step}", problem is None):
            return True
        self._loaded = None
        self.disable(str(problem) if problem else "another rank can't load it")
        return False

    def _read(self) -> None:
        if self.runtime is None or self.recovery is None:
            raise NoVersionError("there is no version in memory", remedy="call find_latest first")
        loaded = self.runtime.load(self.recovery)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stored = (loaded.record.topology, loaded.attributes.get("layout", ""))
        self._loaded = put_together(loaded.state, self.folder)

    def _compare(self, model: Sequence[torch.nn.Module]) -> None:
        topology, stored_layout = self._stored
        rank = None if self.runtime is None else self.runtime.rank
        if topology and topology != self._topology:
            raise TopologyMismatchError(
                f"saved with {_only(topology, self._topology)}, the job now has {_only(self._topology, topology)}",
                remedy="start the job as it was to resume from memory",
                rank=rank,
                step=self.found,
            )
        if stored_layout and stored_layout != self._layout:
            raise StateMismatchError(
                parameters.first_difference(self._loaded, model),
                remedy="give another model another job id",
                rank=rank,
                step=self.found,
            )

    def _verify(self, model: Sequence[torch.nn.Module]) -> None:
        given = getattr(self._used, "given", None)
        if given is None:
            return
        wrong = parameters.unlike(given, model)
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            log.error(
                "after the resume from step %d these parameters do not hold what was stored: %s", self.found, shown
            )

    def _go_on_from(self, step: int) -> None:
        self._told = True
        if self.runtime is not None:
            try:
                self.runtime.resumed(step)
            except Exception as error:
                log.error("the store could not be told that training goes on from step %d: %s", step, error)


def _only(these: str, those: str) -> str:
    """The words of ``these`` that ``those`` does not have."""
    known = set(those.split(" "))
    return " ".join(word for word in these.split(" ") if word not in known) or "nothing else"
