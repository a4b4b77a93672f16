"""The transport that the job has chosen, made for one rank."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mlflashpoint.errors import ReplicationError
from mlflashpoint.replication.transport import Identity, Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SETTING = "MLFLASHPOINT_TRANSPORT"


def make_transport(kind: str, store: Store, identity: Identity, *, connect_timeout_s: float) -> Transport:
    """The transport of that kind, a value of the setting.

    Args:
        kind: ``gloo``, ``mooncake`` (over TCP) or ``mooncake-rdma``; the same on all ranks of the group.
        store: the job's store, under a prefix that is the same on all ranks of the group and that nobody else uses.
        identity: who this rank is.
        connect_timeout_s: longest time for a connection, where the transport makes one, and for this host's address.

    Raises:
        SettingError, ReplicationError, DeadlineExceededError: it can't be used here.
    """
    # Each brings an engine, which a job that has chosen another does without.
    if kind == "gloo":
        from mlflashpoint.replication.gloo import GlooTransport

        return GlooTransport(store, identity, connect_timeout_s=connect_timeout_s)
    from mlflashpoint.replication.mooncake import MooncakeTransport

    protocol = "rdma" if kind == "mooncake-rdma" else "tcp"
    return MooncakeTransport(store, identity, protocol=protocol, connect_timeout_s=connect_timeout_s)


def missing_engine(kind: str) -> ReplicationError | None:
    """The error for an engine that is not installed; None if it is, or none is needed. Imports nothing."""
    if kind == "gloo" or importlib.util.find_spec("mooncake") is not None:
        return None
    return no_engine("No module named 'mooncake'")


def no_engine(reason: str) -> ReplicationError:
    """The error for the Mooncake engine that can't be loaded."""
    return ReplicationError(
        f"the Mooncake transfer engine can't be loaded: {reason}",
        setting=SETTING,
        remedy="pip install 'mlflashpoint[mooncake]', with the libraries libibverbs and libnuma on the system, on all"
        f" nodes, or set {SETTING}=gloo",
    )
