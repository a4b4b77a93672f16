"""Which network interface gloo uses here, and what to say when it is the wrong one."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroupGloo

from mlflashpoint.errors import ReplicationError, SettingError
from mlflashpoint.replication.deadline import Deadline

INTERFACE_SETTING = "GLOO_SOCKET_IFNAME"

_NICE = 10
_LOWEST = 19

#: what to do when peers can't reach each other
REMEDY = f"set {INTERFACE_SETTING} to the network interface by which the nodes reach each other (ip -brief address)"


def make_background_devices(count: int, *, timeout_s: float) -> tuple[list[Any], str]:
    """`make_devices` in the background: their native threads yield to the training threads when processors are busy.

    A thread inherits the niceness of the one that starts it, so a short-lived thread lowers its own and makes them.
    Python threads are left as they are: one that is preempted while it holds the interpreter's lock would hold up
    training.

    Args:
        count: how many.
        timeout_s: as for `local_address`.

    Raises:
        SettingError, ReplicationError: as `make_devices`.
        DeadlineExceededError: as `local_address`.
    """
    made: list[tuple[list[Any], str]] = []
    errors: list[Exception] = []

    def make() -> None:
        with contextlib.suppress(OSError):
            lower = min(_LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lower)
        try:
            made.append(make_devices(count, timeout_s=timeout_s))
        except Exception as error:
            errors.append(error)

    maker = threading.Thread(target=make, name="mlflashpoint-devices", daemon=True)
    maker.start()
    maker.join()
    if errors:
        raise errors[0]
    return made[0]


def make_devices(count: int, environ: Mapping[str, str] | None = None, *, timeout_s: float) -> tuple[list[Any], str]:
    """``count`` gloo devices, each with one thread of its own, on the interfaces that gloo would use for the job.

    Returns:
        The devices, and the interface names or the address that they listen on, for diagnosis.

    Raises:
        SettingError: GLOO_SOCKET_IFNAME names an interface that does not exist or has no address.
        ReplicationError: the variable is unset and this host's name does not resolve to an address of this host.
        DeadlineExceededError: as `local_address`.
    """
    env = os.environ if environ is None else environ
    names = [name.strip() for name in env.get(INTERFACE_SETTING, "").split(",") if name.strip()]
    if names:
        return [_on_interface(names[lane % len(names)]) for lane in range(count)], ",".join(names)
    address = local_address(timeout_s)
    try:
        return [_create(hostname=address) for _ in range(count)], address
    except RuntimeError as error:
        raise ReplicationError(f"gloo can't listen on {address}: {reason(error)}", remedy=REMEDY) from error


def local_address(timeout_s: float) -> str:
    """The address that this host's name stands for, as gloo resolves it.

    Args:
        timeout_s: seconds until a name server that does not answer is left behind.

    Raises:
        DeadlineExceededError: it has not answered by then.
        ReplicationError: the name does not resolve, or to no address of this host. Gloo itself falls back to loopback
            there, which peers on other nodes then fail to reach.
    """
    name = socket.gethostname()
    try:
        candidates = _resolved(name, Deadline(timeout_s))
    except OSError as error:
        raise ReplicationError(f"host name {name!r} does not resolve: {error}", remedy=REMEDY) from error
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    found = ", ".join(sorted({str(candidate[4][0]) for candidate in candidates}))
    raise ReplicationError(f"host name {name!r} resolves to {found}, which is no address of this host", remedy=REMEDY)


def _resolved(name: str, deadline: Deadline) -> list[Any]:
    """The addresses that ``name`` stands for; raises as getaddrinfo, which knows no deadline, and at the deadline."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except OSError as error:
            found.put(error)

    threading.Thread(target=resolve, name="mlflashpoint-resolve", daemon=True).start()
    try:
        answer = found.get(timeout=deadline.remaining_s)
    except queue.Empty:
        late = deadline.exceeded(f"answer to what address host name {name!r} stands for")
        late.remedy = REMEDY
        raise late from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _on_interface(name: str) -> Any:
    try:
        return _create(interface=name)
    except RuntimeError as error:
        present = ", ".join(interface for _, interface in socket.if_nameindex())
        raise SettingError(
            f"gloo can't use network interface {name!r}: it does not exist or has no address; this host has {present}",
            setting=INTERFACE_SETTING,
            value=name,
            remedy=REMEDY,
        ) from error


def _create(**where: str) -> Any:
    # Lazy connections would ask for the peer's address at the first send, outside of any deadline of ours.
    if "lazy_init" in (ProcessGroupGloo.create_device.__doc__ or ""):
        return ProcessGroupGloo.create_device(**where, lazy_init=False)
    return ProcessGroupGloo.create_device(**where)


def reason(error: Exception) -> str:
    """What gloo says, without its source file and its advice."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]
