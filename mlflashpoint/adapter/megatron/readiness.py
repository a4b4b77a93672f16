"""Whether all ranks can go on to the next collective; if one can't, an error on each that says which and why.

Asked of the ranks of torch.distributed, through the job's store: a rank that has no memory store, or can't tell which,
answers too. So no rank waits in a collective, which knows no deadline of ours, for one that has failed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from mlflashpoint import errors
from mlflashpoint.core.checkpoint_saver import Stores
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.meeting import Meeting
from mlflashpoint.core.node_versions import split_version
from mlflashpoint.core.round import SAME_ID, Question
from mlflashpoint.errors import FlashpointError, PeerError

#: no group's: those begin with ``mlflashpoint/``
_PREFIX = "mlflashpoint-megatron"
#: the inner deadline tells who is missing; the outer one only guards against a call that never comes back
_SLACK_S = 10.0
_MAX_TEXT = 2000
_FIELDS = ("remedy", "setting", "rank", "step", "path")


_meeting = Meeting(_PREFIX)


def all_ready(
    what: str,
    problem: BaseException | None = None,
    *,
    deadline_s: float,
    version: str,
    vote: bool = True,
    remedy: str = SAME_ID,
) -> bool:
    """Go on only if no rank has a problem; collective, within the deadline.

    Args:
        what: names the question.
        problem: why this rank can't go on.
        deadline_s: longest wait for the other ranks.
        version: what the question is about, of ``name_of``.
        vote: what else this rank is asked.
        remedy: of ranks that are at different versions.

    Returns:
        whether every rank votes so.

    Raises:
        the problem itself on the rank that has it; on the others an error of the same kind, if it is one of ours, else
        PeerError with its text.
        StepError: the ranks are at different versions.
        DeadlineExceededError: some ranks did not come. Raised on those too, once they ask the same of the same version.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if problem is not None:
            raise problem
        return vote
    rank = dist.get_rank()
    if isinstance(problem, FlashpointError) and problem.rank is None:
        problem.rank = rank
    question = _question(what, problem, vote, version, rank, remedy)
    try:
        outcome = _meeting.ask(
            dist.distributed_c10d._get_default_store(),
            question,
            rank=rank,
            size=dist.get_world_size(),
            deadline_s=deadline_s,
            limit_s=deadline_s + _SLACK_S,
        ).outcome
    except FlashpointError as error:
        raise problem or error from None
    if problem is not None:
        raise problem
    if not isinstance(outcome, dict) or "kind" not in outcome:
        raise PeerError("an answer in the job's store is malformed")
    if outcome["kind"] is not None:
        raise _error_of(outcome)
    return bool(outcome["vote"])


def name_of(stores: Stores, version: object) -> str:
    """What all ranks call ``version``: base containers may be other paths on other nodes."""
    with contextlib.suppress(FlashpointError):
        step = split_version(str(version), stores.group)[1]
        return f"{stores.group}/{CheckpointContainerId.format_version_container(step)}"
    return str(version)


def _question(
    what: str, problem: BaseException | None, vote: bool, version: str, rank: int, remedy: str = SAME_ID
) -> Question:
    return Question(
        what,
        yes=lambda unanimous: {"kind": None, "vote": unanimous},
        no=lambda error: _record(error, rank),
        objection=None if problem is None else _record(problem, rank),
        about=version,
        remedy=remedy,
        vote=vote,
    )


def _record(problem: BaseException, rank: int) -> dict[str, Any]:
    """The problem as plain data; of an error that is none of ours the text alone."""
    if isinstance(problem, FlashpointError) and type(problem).__init__ is FlashpointError.__init__:
        known = {name: getattr(problem, name) for name in _FIELDS}
        return {**known, "kind": type(problem).__name__, "message": problem.message[:_MAX_TEXT]}
    return {"kind": PeerError.__name__, "message": f"{type(problem).__name__}: {problem}"[:_MAX_TEXT], "rank": rank}


def _error_of(record: dict[str, Any]) -> FlashpointError:
    kind = getattr(errors, str(record["kind"]), PeerError)
    if not (isinstance(kind, type) and issubclass(kind, FlashpointError)):
        kind = PeerError
    return kind(str(record.get("message")), **{name: record.get(name) for name in _FIELDS})
