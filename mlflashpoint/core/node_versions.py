"""Which versions lie whole in a node's memory, told from its files alone: what a process can know that owns no seat.

Nothing here takes a seat, writes a file or tells the job anything. A shard has a commit record only once its checkpoint
was finished on all ranks, so a version is complete if every rank's shard lies here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mlflashpoint.core.channel import Channel, Store, poll
from mlflashpoint.core.connection import drop
from mlflashpoint.core.container import DEFAULT_GROUP, group_that_owns, look_into
from mlflashpoint.core.deadline import Deadline, bounded
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.incarnation import Lineage, read_lineage
from mlflashpoint.core.manifest import node_copies
from mlflashpoint.core.plan import RecoveryPlan, VersionKey, plan_recovery
from mlflashpoint.core.room import Absent
from mlflashpoint.core.roster import meet
from mlflashpoint.errors import (
    CheckpointIdError,
    FlashpointError,
    ForeignContainerError,
    NoVersionError,
    PeerError,
)

log = logging.getLogger("mlflashpoint.core")

_AGREE_S = 60.0
#: the inner deadline tells who is missing; the outer one only guards against a call that never comes back
_SLACK_S = 5.0


class NodeLoader:
    """Finds versions for a process that is no rank of the job: an evaluator, a notebook, an export script.

    Has the methods that a reader asks of ``DefaultMLFlashpointCheckpointLoader``. What it loads tells the job nothing.

    Args:
        group: name of the set of ranks that saved together.
        job_id: refuse the container of another job; None reads any of this user's.
    """

    def __init__(self, *, group: str = DEFAULT_GROUP, job_id: str | None = None) -> None:
        self.group = group
        self.job_id = job_id

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str, *, durable_step: int | None = None
    ) -> CheckpointContainerId | None:
        """As ``newest_on_nodes``."""
        base = CheckpointContainerId(checkpoint_base_container)
        return newest_on_nodes(base, self.group, durable_step=durable_step, job_id=self.job_id)

    def found(self, version: str) -> None:
        """Nothing: every version is looked for on this node."""

    def await_saved(self, version: str) -> None:
        """Nothing: what this process loads it has not saved."""

    def loaded(self, version: str) -> None:
        """Nothing: the job does not go on from what is loaded here."""


def newest_on_nodes(
    base: CheckpointContainerId, group: str, *, durable_step: int | None = None, job_id: str | None = None
) -> CheckpointContainerId | None:
    """The newest version that lies whole on the node of every process, None if there is none.

    Where torch.distributed is initialised it is collective, and all processes get one answer.

    Args:
        base: base container.
        group: name of the set of ranks that saved together.
        durable_step: newest step in durable storage; an older version does not count.
        job_id: refuse the container of another job; None reads any of this user's.

    Raises:
        ContainerError, ForeignContainerError: as ``plan_on_node``.
        PeerError: the processes could not agree.
    """
    versions: Sequence[VersionKey] = ()
    problem: FlashpointError | None = None
    try:
        versions = plan_on_node(base, group, job_id=job_id).complete
    except NoVersionError as error:
        log.debug("nothing to load from %s: %s", base, error)
    except FlashpointError as error:
        problem = error
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # With a problem too: the others wait for what this process sees.
        newest = _common(group, versions, problem)
    elif problem is not None:
        raise problem
    else:
        newest = next(iter(versions), None)
    if newest is None or (durable_step is not None and durable_step > newest.step):
        return None
    return version_of(base, newest.step, group)


def _common(group: str, versions: Sequence[VersionKey], problem: FlashpointError | None) -> VersionKey | None:
    """The first of ``versions`` that every process has among its own; raises this one's problem, or another's."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mine = [list(version) for version in versions] if problem is None else str(problem)
    why = "rank 0 did not answer"
    try:
        chosen = bounded(lambda: _talk(store, group, mine), _AGREE_S + _SLACK_S, "agreeing on a version")
    except FlashpointError as error:
        drop(store)
        chosen, why = None, str(error)
    if problem is not None:
        raise problem
    if chosen is None or chosen["problem"] is not None:
        raise PeerError(
            f"the processes could not agree on a version: {why if chosen is None else chosen['problem']}", rank=rank
        )
    return next((version for version in versions if list(version) == chosen["version"]), None)


def _talk(store: Store, group: str, mine: list[list[Any]] | str) -> dict[str, Any] | None:
    """Rank 0's choice, None if it comes too late; raises as ``roster.meet`` does, and PeerError."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    deadline = Deadline(_AGREE_S)
    channel = Channel(store, f"mlflashpoint/{group}/on-node")
    # The store may hold what processes that are dead by now have agreed on.
    name = meet(channel.under("start"), rank=rank, world_size=world_size, deadline_s=deadline.remaining_s)
    channel = channel.under(f"run-{name}")
    channel.post(f"seen/{rank}", mine)
    everyone = [f"seen/{other}" for other in range(world_size)]

    def all_seen() -> list[Any] | None:
        found = channel.read_present(everyone)
        return None if any(seen is None for seen in found) else found

    if rank == 0:
        seen = poll(all_seen, deadline, world_size=world_size)
        channel.post("chosen", _choose(channel.read_present(everyone) if seen is None else seen))
    chosen: dict[str, Any] | None = poll(lambda: channel.read("chosen"), deadline, world_size=world_size)
    # The others act on the choice: what is only tidied up may fail.
    with contextlib.suppress(PeerError):
        if chosen is not None and channel.add("read") == world_size:
            channel.delete(*everyone, "chosen", "read")
    return chosen


def _choose(seen: list[Any]) -> dict[str, Any]:
    """What all do, who have said what lies on their node; None for whoever has not."""
    late = [rank for rank, found in enumerate(seen) if found is None]
    if late:
        return {"problem": f"{Absent(late, 'what lies on its node')} within {_AGREE_S:g} s", "version": None}
    problem = next((found for found in seen if isinstance(found, str)), None)
    if problem is not None:
        return {"problem": problem, "version": None}
    everywhere = (version for version in seen[0] if all(version in found for found in seen[1:]))
    return {"problem": None, "version": next(everywhere, None)}


def plan_on_node(
    base_container: str, group: str, step: int | None = None, *, job_id: str | None = None
) -> RecoveryPlan:
    """The newest version, or that of ``step``, that lies whole in this node's memory; asks no other rank.

    Reads only, so it also serves a process that does not own a seat.

    Raises:
        NoVersionError: there is none; gives the reason.
        ContainerError: the container can't be read, or other users may write to it.
        ForeignContainerError: it belongs to another user, or to another job than ``job_id``, if that is given.
    """
    base = Path(base_container)
    container = look_into(base)
    if container is None:
        raise _no_container(base)
    if job_id not in (None, container.job_id):
        raise ForeignContainerError(
            f"the container belongs to job {container.job_id!r}, not {job_id!r}",
            path=base,
            remedy="give the base container of the job whose versions are wanted",
        )
    copies = [copy for copy in node_copies(container, group, holder=0) if step is None or copy.record.step == step]
    lineage = Lineage()
    try:
        lineage = read_lineage(container.group_dir(group))
    except FlashpointError as error:
        log.warning("the lineage on this node is left out: %s", error)
    # No job has no ranks, so that each version counts as one to be resharded, and any layout is taken.
    plan = plan_recovery(copies, 0, placement={0: container.node}, lineage=lineage, group=group, reshard=True)
    if plan.version is None:
        what = "no version" if step is None else f"no version of step {step}"
        why = plan.skipped[0].reason if plan.skipped else "nothing of the kind lies there"
        raise NoVersionError(
            f"{what} on this node: {why}",
            path=base,
            step=step,
            remedy="let get_latest_complete_checkpoint choose, or load the durable checkpoint",
        )
    return plan


def _no_container(path: Path) -> NoVersionError:
    group = group_that_owns(path)
    if group is None:
        return NoVersionError(
            "the folder is no memory container", path=path, remedy="give the base container that the job saved to"
        )
    return NoVersionError(
        f"the folder is that of the group {group!r} of a memory container",
        path=path,
        remedy=f"read it with a store or a loader of that group (group={group!r})",
    )


def version_of(base: CheckpointContainerId, step: int, group: str = DEFAULT_GROUP) -> CheckpointContainerId:
    """The version of ``step`` in a base container; raises CheckpointIdError.

    ``<base>/step-<n>_ckpt`` for the default group, ``<base>/<group>/step-<n>_ckpt`` for a named one: adapters keep
    files in a version's folder, so no two groups may have the same.
    """
    folder = base if group == DEFAULT_GROUP else CheckpointContainerId.create_child(base, group)
    return CheckpointContainerId.create_child(folder, CheckpointContainerId.format_version_container(step))


def split_version(version: str, group: str = DEFAULT_GROUP) -> tuple[CheckpointContainerId, int]:
    """Base container and step of one of the group's versions; the inverse of ``version_of``.

    Raises:
        CheckpointIdError: it is no version, or none of that group.
    """
    found = CheckpointContainerId(str(version))
    folder, step = found.get_parent(), found.step
    if folder is None or step is None:
        raise CheckpointIdError(
            "the checkpoint id is no version in a base container",
            path=found,
            remedy="use create_child(base, CheckpointContainerId.format_version_container(step))",
        )
    base = folder if group == DEFAULT_GROUP else folder.get_parent()
    if base is None or version_of(base, step, group) != found:
        raise CheckpointIdError(
            f"the checkpoint id is no version of the group {group!r}: those are <base container>/{group}/step-<n>_ckpt",
            path=found,
            remedy="use the ids that version(step) and latest() of the group's store give",
        )
    return base, step
