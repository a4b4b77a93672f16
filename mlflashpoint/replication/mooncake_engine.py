"""The few calls of the Mooncake transfer engine that are needed: register memory, and write into a peer's memory."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mlflashpoint.errors import PeerError, ReplicationError, SettingError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.gloo_device import INTERFACE_SETTING, REMEDY, local_address
from mlflashpoint.replication.memory import address_of
from mlflashpoint.replication.transports import no_engine

_PIECE_BYTES = 64 << 20
_IN_FLIGHT = 2
_LOOK_EVERY_S = 0.0005
_SIOCGIFADDR = 0x8915


class Writing:
    """One write under way. Its memory stays in use until `ended`, whatever its deadline says: nothing can cancel it."""

    def __init__(self, engine: Any, session: str, views: Sequence[memoryview], addresses: Sequence[int]) -> None:
        self._engine = engine
        self._session = session
        self._to_do = [
            (view[start : start + _PIECE_BYTES], address + start)
            for view, address in zip(views, addresses, strict=True)
            for start in range(0, len(view), _PIECE_BYTES)
        ][::-1]
        self._flying: list[tuple[int, memoryview]] = []
        self._failed = False

    def run(self, peer: int, deadline: Deadline, progress: Callable[[int], None] | None = None) -> None:
        """Write everything; ``progress`` is told of bytes that arrived. Raises PeerError, DeadlineExceededError."""
        while self._to_do or self._flying:
            while self._to_do and len(self._flying) < _IN_FLIGHT:
                view, address = self._to_do.pop()
                number = self._engine.transfer_submit_write(self._session, address_of(view), address, len(view))
                if number == 0:
                    self._failed = True
                    raise PeerError(f"rank {peer} can't be connected at {self._session}", rank=peer, remedy=REMEDY)
                self._flying.append((number, view))
            arrived = self._look()
            if arrived and progress is not None:
                progress(arrived)
            if self._failed:
                raise PeerError(f"rank {peer} went away in the middle of a transfer", rank=peer)
            if deadline.expired:
                raise deadline.exceeded(f"progress from rank {peer}", rank=peer)
            if self._flying:
                time.sleep(_LOOK_EVERY_S)

    def ended(self, timeout_s: float) -> bool:
        """Whether the engine has let go of the memory within ``timeout_s`` seconds."""
        end = time.monotonic() + timeout_s
        while self._flying and time.monotonic() < end:
            self._look()
            time.sleep(0.05)
        return not self._flying

    def _look(self) -> int:
        still, arrived = [], 0
        for number, view in self._flying:
            status = self._engine.transfer_check_status(number)
            if status == 0:
                still.append((number, view))
            elif status == 1:
                arrived += len(view)
            else:
                self._failed = True
        self._flying = still
        return arrived


class Engine:
    """One engine of this process.

    Args:
        protocol: ``tcp`` or ``rdma``.
        device: names of RDMA devices, empty for all.
        timeout_s: as for `local_address`.

    Attributes:
        session: under which name peers find it.

    Raises:
        ReplicationError: the engine is not installed or does not start.
        SettingError, DeadlineExceededError: this host's address can't be told; see `local_address`.
    """

    def __init__(self, protocol: str, device: str, timeout_s: float) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise no_engine(str(error)) from error
        self._engine: Any = TransferEngine()
        host = _host(timeout_s)
        status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if status != 0:
            raise ReplicationError(
                f"the Mooncake transfer engine did not start on {host} with {protocol}: error {status}", remedy=REMEDY
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._regions: dict[tuple[int, int], int] = {}

    def register(self, views: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Let the engine use the memory; returns what `release` takes. Raises ReplicationError."""
        held: list[tuple[int, int]] = []
        for view in views:
            if not len(view):
                continue
            start, end = address_of(view), address_of(view) + len(view)
            with self._lock:
                region = next((r for r in self._regions if r[0] <= start and end <= r[1]), (start, end))
                if region not in self._regions:
                    status = self._engine.register_memory(start, end - start)
                    if status != 0:
                        break
                    self._regions[region] = 0
                self._regions[region] += 1
                held.append(region)
        else:
            return held
        self.release(held)
        raise ReplicationError(f"the Mooncake transfer engine can't use {end - start} bytes of memory: error {status}")

    def release(self, held: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            for region in held:
                self._regions[region] -= 1
                if self._regions[region] == 0:
                    del self._regions[region]
                    self._engine.unregister_memory(region[0])

    def write(self, session: str, views: Sequence[memoryview], addresses: Sequence[int]) -> Writing:
        return Writing(self._engine, session, views, addresses)


def _host(timeout_s: float) -> str:
    """The address that peers reach this host by: that of the interface which gloo would use."""
    name = os.environ.get(INTERFACE_SETTING, "").split(",")[0].strip()
    if not name:
        return local_address(timeout_s)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    raise SettingError(
        f"network interface {name!r} does not exist or has no IPv4 address",
        setting=INTERFACE_SETTING,
        value=name,
        remedy=REMEDY,
    )
