"""Messages between ranks through the job's store arrive once, in order, and a gap never blocks for good."""

from __future__ import annotations

import queue
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from mlflashpoint.errors import ReplicationError
from mlflashpoint.replication.mailbox import MAX_MESSAGE_BYTES, Mailbox
from tests.replication.peers import ROOT


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


def mailbox(store, rank):
    inbox: queue.Queue = queue.Queue()
    return Mailbox(dist.PrefixStore("m", store), rank=rank, deliver=inbox.put), inbox


def test_messages_arrive_once_and_in_order(store):
    sender, _ = mailbox(store, 0)
    receiver, inbox = mailbox(store, 1)
    for number in range(50):
        sender.post(1, {"n": number})
    assert [inbox.get(timeout=20)["n"] for _ in range(50)] == list(range(50))
    sender.close(timeout_s=5)
    receiver.close(timeout_s=5)
    assert inbox.empty()


def test_messages_posted_before_the_receiver_came_are_delivered(store):
    sender, _ = mailbox(store, 0)
    for number in range(3):
        sender.post(1, {"n": number})
    receiver, inbox = mailbox(store, 1)
    assert [inbox.get(timeout=20)["n"] for _ in range(3)] == [0, 1, 2]
    receiver.close(timeout_s=5)
    receiver, inbox = mailbox(store, 1)
    sender.post(1, {"n": 3})
    assert inbox.get(timeout=20) == {"n": 3} and inbox.empty()
    receiver.close(timeout_s=5)
    sender.close(timeout_s=5)


def test_a_sender_that_died_between_number_and_message_blocks_nobody_for_good(store):
    sender, _ = mailbox(store, 0)
    receiver, inbox = mailbox(store, 1)
    dist.PrefixStore("m", store).add("box/1/count", 1)
    number = sender.post(1, {"n": "after the gap"})
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.3)
    sender.unblock(1, number)
    assert inbox.get(timeout=20) == {"n": "after the gap"}
    sender.close(timeout_s=5)
    receiver.close(timeout_s=5)


def test_a_message_that_is_being_posted_while_the_receiver_restarts_is_not_lost(store):
    receiver, inbox = mailbox(store, 1)
    receiver.post(1, {"n": 1})
    assert inbox.get(timeout=20) == {"n": 1}
    receiver.close(timeout_s=5)
    raw = dist.PrefixStore("m", store)
    raw.set(f"box/1/{raw.add('box/1/count', 1)}", '{"n": 2}')
    number = raw.add("box/1/count", 1)
    receiver, inbox = mailbox(store, 1)
    assert inbox.get(timeout=20) == {"n": 2}
    raw.set(f"box/1/{number}", '{"n": 3}')
    assert inbox.get(timeout=20) == {"n": 3}
    receiver.close(timeout_s=5)


def test_what_is_no_message_is_passed_over(store):
    receiver, inbox = mailbox(store, 1)
    raw = dist.PrefixStore("m", store)
    for junk in ("", "not json", "[1]", "[" * 100_000, "x" * (MAX_MESSAGE_BYTES + 1), '{"n": 1}'):
        raw.set(f"box/1/{raw.add('box/1/count', 1)}", junk)
    assert inbox.get(timeout=20) == {"n": 1}
    receiver.close(timeout_s=5)


def test_a_fault_in_handling_one_message_does_not_stop_the_next(store):
    seen: queue.Queue = queue.Queue()

    def deliver(message):
        seen.put(message)
        raise RuntimeError("a bug")

    receiver = Mailbox(dist.PrefixStore("m", store), rank=1, deliver=deliver)
    for number in range(2):
        receiver.post(1, {"n": number})
    assert [seen.get(timeout=20)["n"] for _ in range(2)] == [0, 1]
    receiver.close(timeout_s=5)


def test_a_message_over_the_cap_is_refused_at_the_sender(store):
    sender, _ = mailbox(store, 0)
    with pytest.raises(ReplicationError, match=str(MAX_MESSAGE_BYTES)):
        sender.post(1, {"n": "x" * MAX_MESSAGE_BYTES})
    sender.close(timeout_s=5)


def test_a_read_message_is_gone_from_the_store(store):
    sender, _ = mailbox(store, 0)
    receiver, inbox = mailbox(store, 1)
    sender.post(1, {"n": 1})
    inbox.get(timeout=20)
    receiver.close(timeout_s=5)
    sender.close(timeout_s=5)
    assert not dist.PrefixStore("m", store).check(["box/1/1"])


def test_a_store_that_dies_is_an_error_and_ends_the_thread():
    host = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import torch.distributed as d, time\n"
            "s = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
            "print(s.port, flush=True)\ntime.sleep(100)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
        box, _ = mailbox(store, 0)
        host.kill()
        host.wait(10)
        box._thread.join(20)
        assert not box._thread.is_alive()
        with pytest.raises(ReplicationError, match="store does not answer"):
            box.post(0, {"n": 1})
        box.close(timeout_s=5)
    finally:
        host.kill()
        host.wait(10)
