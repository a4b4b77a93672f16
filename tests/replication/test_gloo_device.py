"""A host that can't be resolved and an interface that is not there are errors that name GLOO_SOCKET_IFNAME."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError, ReplicationError, SettingError
from mlflashpoint.replication import gloo_device
from mlflashpoint.replication.gloo_device import local_address, make_background_devices, make_devices
from mlflashpoint.replication.gloo_rendezvous import Rendezvous
from tests.replication.peers import ROOT


def test_a_wrong_interface_is_named_with_those_that_are_there():
    with pytest.raises(SettingError) as caught:
        make_devices(1, {"GLOO_SOCKET_IFNAME": "nope0"}, timeout_s=20)
    text = str(caught.value)
    assert "GLOO_SOCKET_IFNAME='nope0'" in text and "lo" in text and "remedy" in text


def test_the_background_devices_raise_the_same(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(SettingError, match="nope0"):
        make_background_devices(2, timeout_s=20)


def test_given_interfaces_are_used_in_turn():
    devices, where = make_devices(2, {"GLOO_SOCKET_IFNAME": "lo, lo"}, timeout_s=20)
    assert len(devices) == 2 and where == "lo,lo"


@pytest.mark.parametrize(
    ("resolve", "said"),
    [
        (lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-2, "Name or service not known")), "does not resolve"),
        (
            lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.9", 0))],
            "203.0.113.9, which is no address of this host",
        ),
    ],
)
def test_a_host_name_without_a_usable_address_is_an_error_that_names_the_setting(monkeypatch, resolve, said):
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ReplicationError, match="GLOO_SOCKET_IFNAME") as caught:
        make_devices(1, {}, timeout_s=20)
    assert said in str(caught.value) and socket.gethostname() in str(caught.value)


def test_a_name_server_that_does_not_answer_is_an_error_at_the_deadline(monkeypatch):
    answered = threading.Event()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(30) and [])
    for asks in (lambda: make_background_devices(1, timeout_s=0.2), lambda: local_address(0.2)):
        with pytest.raises(DeadlineExceededError, match="GLOO_SOCKET_IFNAME"):
            asks()
    answered.set()


def test_a_host_whose_name_does_not_resolve_is_told_so_for_real():
    """In a host name space of its own, where unshare is allowed."""
    code = (
        "import socket; socket.sethostname('nowhere-to-be-found')\n"
        "from mlflashpoint.replication.gloo_device import make_devices\n"
        "from mlflashpoint.errors import ReplicationError\n"
        "try: make_devices(1, {}, timeout_s=20)\n"
        "except ReplicationError as error: print(error)\n"
    )
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no new host name space here")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["unshare", "--uts", sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60
    )
    assert "nowhere-to-be-found" in done.stdout and "GLOO_SOCKET_IFNAME" in done.stdout, done.stderr


def test_a_peer_on_another_host_that_listens_on_loopback_is_refused_at_once(monkeypatch):
    rendezvous = Rendezvous.__new__(Rendezvous)
    rendezvous._identity = type("Who", (), {"rank": 0})
    rendezvous._listens_on = "10.0.0.1"
    with pytest.raises(PeerError, match=r"127\.0\.0\.1, which no other host reaches") as caught:
        rendezvous._check_reachable({"host": "elsewhere", "listens_on": "127.0.0.1"}, 5)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value) and caught.value.rank == 5
    rendezvous._check_reachable({"host": socket.gethostname(), "listens_on": "127.0.0.1"}, 5)
    rendezvous._listens_on = "lo"
    with pytest.raises(FlashpointError, match="rank 0 listens on lo"):
        rendezvous._check_reachable({"host": "elsewhere", "listens_on": "10.0.0.2"}, 5)


def test_native_threads_yield_to_training():
    made, _ = make_background_devices(1, timeout_s=20)
    niceness = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")]
    lower = min(gloo_device._LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + gloo_device._NICE)
    assert made and niceness.count(lower) >= 1
    assert os.getpriority(os.PRIO_PROCESS, 0) == min(niceness)
