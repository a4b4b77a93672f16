"""The runtime: one per process, container and group, and all that an adapter talks to."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mlflashpoint.core import sigterm
from mlflashpoint.core.channel import Channel, Store
from mlflashpoint.core.claims import CLAIMS
from mlflashpoint.core.conversation import Conversation
from mlflashpoint.core.counters import Counters, Stats, as_flashpoint
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.depot import Depot
from mlflashpoint.core.drain import Drained, drain_of_given_up, drain_rank
from mlflashpoint.core.ending import end
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.loads import Loads
from mlflashpoint.core.pipeline import Pipeline
from mlflashpoint.core.planner import Wish
from mlflashpoint.core.ranks import Ranks, ranks_from
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.recovery import Recovery
from mlflashpoint.core.results import Loaded, SaveResult
from mlflashpoint.core.saves import Saves, whole_step
from mlflashpoint.core.session import Session
from mlflashpoint.errors import FlashpointError
from mlflashpoint.settings import StoreConfig

__all__ = ["Loaded", "Recovery", "Runtime", "SaveResult"]

log = logging.getLogger("mlflashpoint.core")


class Runtime:
    """The memory store of one process for one group of ranks.

    Args:
        config: the settings.
        rank, world_size: global rank within the group, and the group's size.
        local_rank: rank among the group's processes on this node; names the seat.
        store: the job's c10d store. None takes that of torch.distributed when first needed; one rank needs none.
        group: name of the set of ranks that save together.
        own: names of what the job keeps in the container beside the store, and may have made before it.

    Constructing it makes the container and takes the seat, talks to nobody and starts no thread. If the container
    can't be used, ``problem`` says why, saves fail, and this rank still answers the others in ``find_latest`` and
    ``agree``; with ``config.strict`` it is raised. A process that has several for one group, in containers of their
    own, opens them in the same order as the other ranks do.

    Raises:
        SettingError: the group's name or the ranks can't be used.
        StoreInUseError: this process has an open runtime of this rank for the container and the group.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        store: Store | None = None,
        group: str = "default",
        own: Collection[str] = (),
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.group = group
        self._claim = CLAIMS.claim(self, config.base_container, group, rank=rank, local_rank=local_rank)
        try:
            ranks = Ranks(rank, world_size, local_rank)
            self._session = Session(config, ranks, group, store, self._claim.number, own)
        except BaseException:
            self._claim.release()
            raise
        self._counters = Counters()
        self._exchange = Exchange(
            self._session,
            self._counters,
            keep=lambda: self._pipeline.standing.keep(),
            obsolete=lambda record: self._pipeline.standing.obsolete(record),
            began=lambda: self._pipeline.standing.began,
        )
        self._pipeline = Pipeline(self._session, self._counters, self._exchange)
        self._depot = Depot(self._session, self._exchange)
        self._conversation = Conversation(self._session, self._depot)
        self._loads = Loads(self._session, self._pipeline.standing, self._exchange, self._depot, self._conversation)
        self._saves = Saves(self._session, self._pipeline, self._counters, self._loads)
        if config.drain_dir is not None:
            sigterm.on_sigterm(
                self, functools.partial(drain_rank, self._session, self._pipeline), config.drain_budget_s
            )
        if self.problem is not None:
            what = "no memory store on this rank, nothing is saved to memory or loaded from it"
            self._counters.lasting(what, self.problem)
            if config.strict:
                self.close()
                raise self.problem

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        group: str = "default",
        store: Store | None = None,
        **overrides: Any,
    ) -> Runtime:
        """A runtime as the environment says; ``overrides`` are fields of StoreConfig.

        Raises:
            RankUnknownError: neither torch.distributed nor the environment tells the ranks.
            SettingError: a setting is malformed, or there is no job id.
            StoreInUseError: as the constructor.
        """
        env = os.environ if environ is None else environ
        return cls(
            StoreConfig.from_env(env, **overrides), **dataclasses.asdict(ranks_from(env)), store=store, group=group
        )

    @property
    def problem(self) -> FlashpointError | None:
        """Why this rank has no memory store, None if it has one."""
        return self._session.problem

    @property
    def closed(self) -> bool:
        return self._claim.released

    def save(
        self,
        state: Any,
        *,
        step: int,
        topology: str = "",
        attributes: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        wait: bool | None = None,
    ) -> SaveResult:
        """Store this rank's shard of ``step``. Every rank calls it for the same steps, in rising order.

        Blocks while the state is copied; the caller may change everything afterwards. A step below the last one means
        that training went back to a step that is not known: no older version counts any more. ``resumed`` tells it.

        Args:
            state: nested dict, list, tuple, scalars and tensors; see ``core.state``.
            step: training step, from 0.
            topology: fingerprint of the parallel layout, equal on all ranks.
            attributes: plain data kept beside the state; or a function that gives it, called in the background before
                the commit: it may wait, with a deadline, and what it raises makes the save fail.
            wait: also wait for this rank's commit; None lets ``config.async_save`` decide.

        Returns:
            what became of it; it raises nothing unless ``config.strict``, then FlashpointError.
        """
        wait = not self.config.async_save if wait is None else wait
        if self.config.drain_dir is not None:
            # A framework may have set a handler of its own meanwhile.
            sigterm.install()
        result = self._saves.save(self._claim.check, state, step, topology, attributes or {}, wait)
        if result.error is not None and self.config.strict:
            raise result.error
        return result

    def save_failed(self, step: int, reason: BaseException) -> None:
        """Tell, instead of ``save``, that this rank has nothing to save at ``step``, so that no other waits for it.

        Args:
            step: as for ``save``.
            reason: why; the other ranks' logs name it. Raises nothing itself.
        """
        try:
            self._claim.check()
            self._saves.failed(step, reason)
        except Exception as error:
            named = as_flashpoint(error, rank=self.rank, step=step)
            self._counters.failure("the other ranks could not be told of a failed save", named)

    def agree(self, key: str, ok: bool) -> bool:
        """Whether every rank says ``ok``; collective, one answer for all.

        Waits ``config.deadline_s`` at most; a rank that does not answer by then makes it False.

        Args:
            key: names the occasion, for example ``save-40``. With one key for many occasions, a rank that missed one
                would vote on the wrong one ever after.
            ok: this rank's vote.
        """
        try:
            self._claim.check_process()
            answer, reason = self._conversation.agree(key, ok)
        except FlashpointError as error:
            self._counters.failure(f"the ranks could not agree on {key}", error)
            return False
        if ok and not answer:
            log.info("the ranks do not agree on %s: %s", key, reason)
        return answer

    def channel(self, role: str) -> Channel:
        """Talk to the group's ranks, under a prefix that the adapters of this start alone use.

        All roles share one connection and one prefix. The first call of a start waits for all ranks, until the
        deadline.

        Raises:
            DeadlineExceededError: some ranks did not come; names them.
            PeerError: there is no store to talk through.
        """
        del role
        self._claim.check_process()
        start = self._session.joined().start
        return self._session.channel().under(f"run-{start.run}/adapter")

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for this rank's background work, replicas included.

        False if it takes longer than ``timeout_s`` (None: ``deadline_s``).
        """
        self._claim.check_process()
        deadline = Deadline(self.config.deadline_s if timeout_s is None else timeout_s)
        return self._pipeline.flush(deadline.remaining_s) and self._exchange.wait_idle(deadline.remaining_s)

    def await_version(self, step: int, timeout_s: float | None = None) -> bool | None:
        """Wait until the outcome of this process's save of ``step`` is settled for all ranks, replicas included.

        Returns at once if there is no such save, and for a save that is settled. Not collective.

        Args:
            step: training step.
            timeout_s: longest wait in seconds; None takes ``config.deadline_s``.

        Returns:
            whether the version is complete; None if no slot here tells: nothing was saved, or it is superseded.

        Raises:
            DeadlineExceededError: it is not settled by then.
        """
        self._claim.check_process()
        return self._pipeline.await_settled(step, self.config.deadline_s if timeout_s is None else timeout_s)

    @property
    def saved_step(self) -> int | None:
        """Step of the last save since training went back, whatever became of it; None for no such save."""
        return self._saves.step

    def find_latest(
        self, *, durable_step: int | None = None, topology: str | None = None, reshard: bool = False
    ) -> Recovery | None:
        """Find what all ranks can go on from; collective, one answer for all.

        Every rank has checked the digests of its shard when this returns; corrupt copies are quarantined and the
        next copy, or the next older version, was taken by all.

        Args:
            durable_step: newest step in durable storage, -1 or None for none; memory is used if it is not older.
                Rank 0's value counts, and so does its value of the others.
            topology: layout that the version must have, None accepts each.
            reshard: also accept a version of another world size or layout, for ``load_shard``.

        Returns:
            what to load, None if there is nothing in memory or a durable checkpoint is newer.

        Raises:
            DeadlineExceededError: some ranks did not answer; names them. Raised on every rank.
            PeerError: the ranks can't talk to each other, or another one gave up.
            StoreClosedError: this rank has closed it.
        """
        self._claim.check()
        self.flush()
        return self._loads.find(Wish(self.group, durable_step, topology, reshard))

    def load(self, recovery: Recovery, *, into: Any = None) -> Loaded:
        """Load this rank's shard of what ``find_latest`` found.

        Args:
            recovery: what ``find_latest`` returned.
            into: a state of the same structure whose tensors are overwritten in place; None makes new tensors.

        Raises:
            TopologyMismatchError: another number of ranks saved it.
            StateMismatchError: ``into`` differs; names the first differing tensors.
            NoVersionError: no copy of the shard can be read any more.
        """
        recovery.require_world(self.world_size, rank=self.rank)
        self._claim.check_process()
        return self._loads.load(recovery, into=into)

    def load_shard(self, recovery: Recovery, rank: int) -> ShardReader:
        """The shard of any rank of the version, for resharding; close the reader before the next save.

        Raises:
            NoVersionError: no copy of it can be read here.
            PeerError: the plan does not list it, or can't be asked.
        """
        self._claim.check_process()
        return self._loads.shard(recovery, rank)

    def resumed(self, step: int) -> None:
        """Tell from which step training goes on, 0 or below for from nothing; every rank, before the first save.

        Versions of earlier starts above it are abandoned for good. Once a save has begun, each call on all ranks is a
        rollback within this process, which abandons what was saved above the step.

        Raises:
            StepError: it is no whole number.
        """
        self._claim.check_process()
        step = whole_step(step)
        self._saves.resumed(step if step > 0 else -1)

    def loaded(self, step: int) -> None:
        """Tell that a version of ``step`` was loaded by other means than ``load``; for adapters.

        It abandons nothing. Where nobody calls ``resumed``, the first save goes on from the newest version below its
        own step that this process has loaded, or else from what it has loaded last.
        """
        self._loads.note(step)

    def stats(self) -> Stats:
        """Numbers since the start: saves, versions, bytes, seconds, steps, replicas, and the last errors' texts."""
        return {**self._counters.snapshot(), **self._exchange.stats(), "group": self.group, "rank": self.rank}

    def drain(self) -> Drained:
        """Copy this rank's shard of the newest complete version to ``config.drain_dir``, and others that it has.

        Blocks for ``config.drain_budget_s`` seconds at most.

        Raises:
            DrainError: there is no directory, no room in it or no time for even one shard.
        """
        self._claim.check_process()
        return drain_rank(self._session, self._pipeline)

    def discard(self) -> None:
        """Give up every version that this rank keeps, replicas too, free their memory, and close.

        For the end of a training that went well: the ranks ``agree`` on that first, for none can recover afterwards.
        """
        self._claim.check()
        self.close(discard=True)

    def close(self, *, discard: bool = False) -> None:
        """Finish the background work, bounded, and give the seat up; may be called twice."""
        sigterm.forget(self)
        if not self._claim.release():
            return
        sigterm.wait()
        end(self._session, self._pipeline, self._exchange, self._depot, discard=discard)

    def hand_over(self) -> None:
        """Close, so that another process of this rank can take the seat; SIGTERM to this one drains what lies there.

        The scheduler's signal, or a launcher's, may reach this process alone, which was the one to save before.
        """
        drain = None if self.closed else drain_of_given_up(self._session)
        self.close()
        if drain is not None:
            sigterm.on_sigterm(self, drain, self.config.drain_budget_s)
