"""A member: one rank of the job as it says who and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlflashpoint.errors import PeerError

#: version of what the ranks say to each other; all ranks must have the same
PROTOCOL = 5


@dataclass(frozen=True)
class Member:
    """One rank of the job as it is now.

    Attributes:
        rank: global rank in the group.
        seat: local rank, which names its seat.
        node: identity of the node's memory container, empty if it has none.
        domain: label of the node's failure domain, empty if none is set.
        seen: highest incarnation number that its node knows of.
        job_id: the job that it takes itself for a part of.
        protocol: version of what the ranks say to each other.
        leader: whether it speaks for its node, as the lowest rank on it does.
        problem: why it has no memory store, None if it has one.
        host: name of its host, for people to read.
        transport: what its replicas are to travel by; must be the same on all ranks.
    """

    rank: int
    seat: int
    node: str
    domain: str
    seen: int
    job_id: str
    protocol: int = PROTOCOL
    leader: bool = False
    problem: str | None = None
    host: str = ""
    transport: str = ""

    @classmethod
    def from_json(cls, raw: Any) -> Member:
        """Raises PeerError for a malformed record."""
        kinds: dict[str, tuple[type, ...]] = {
            "rank": (int,),
            "seat": (int,),
            "node": (str,),
            "domain": (str,),
            "seen": (int,),
            "job_id": (str,),
            "protocol": (int,),
            "leader": (bool,),
            "problem": (str, type(None)),
            "host": (str,),
            "transport": (str,),
        }
        if not isinstance(raw, dict) or set(raw) != set(kinds) or any(type(raw[n]) not in k for n, k in kinds.items()):
            raise PeerError(
                "a rank's entry in the roster is malformed", remedy="run one mlflashpoint release on all ranks"
            )
        return cls(**raw)
