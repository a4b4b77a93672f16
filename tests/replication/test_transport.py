"""What every transport owes the replicator; one suite for all of them, between real processes."""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mlflashpoint.errors import DeadlineExceededError, PeerError, ReplicationError
from mlflashpoint.replication.transport import MAX_HEADER_BYTES, Identity
from tests.replication import peers

pytestmark = pytest.mark.multiprocess

MIB = 1 << 20
LARGE = 136 * MIB  # several pieces on the lanes
HUGE = 264 * MIB  # when the first byte has arrived, far more is missing than the sockets buffer


class Fabric:
    """Rank 0 in this process, rank 1 in another one, on one store."""

    def __init__(self, kind):
        self.kind = kind
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        self.me = self.transport(0)
        self.peer = None
        self.restart()

    def transport(self, rank, **identity):
        who = Identity(**{"job_id": "job", "group": "default", "incarnation": 1, "rank": rank, **identity})
        return peers.make_transport(self.kind, dist.PrefixStore("replication", self.store), who)

    def restart(self, *, script=False):
        if self.peer is not None:
            self.peer.stop()
        self.peer = peers.Peer(self.kind, self.store.port, 1, script=script)
        assert self.peer.ask("ready") == {}
        return self.peer

    def close(self):
        self.peer.stop()
        self.me.close(timeout_s=10)

    def settle(self):
        """Two fresh ranks, if a test that failed has left a dead one or one that is busy."""
        if not self.peer.idle:
            self.close()
            self.me = self.transport(0)
            self.restart()

    def send(self, buffers, header=b"head", timeout_s=30.0, progress=None):
        self.me.send(1, header, [memoryview(b) for b in buffers], timeout_s=timeout_s, progress=progress)


@pytest.fixture(scope="module", params=["gloo", "mooncake"])
def fabric(request):
    if request.param == "mooncake" and (missing := peers.find_mooncake()):
        pytest.skip(f"NOT RUN: no Mooncake transfer engine here: {missing}")
    fabric = Fabric(request.param)
    yield fabric
    fabric.close()


@pytest.fixture(autouse=True)
def _settled(fabric):
    fabric.settle()


def once(act):
    """Progress that is told of the first bytes only."""
    waiting = [act]

    def progress(_):
        if waiting:
            waiting.pop()()

    return progress


def cut_off(move):
    """Call ``move`` with sizes until it raises.

    A signal at the first byte is to cut off all others. A busy machine may have moved them before it comes.
    """
    for times in (1, 2, 4):
        move([1, times * HUGE])


@pytest.mark.parametrize("sizes", [[1], [5 * MIB + 3], [0, 7, 0, 3 * MIB, 1], [LARGE + 11, 4097], [], [0]])
def test_a_sent_shard_arrives_byte_for_byte_in_the_receivers_buffers(fabric, sizes):
    parts = [peers.pattern(i, size) for i, size in enumerate(sizes)]
    moved = []
    fabric.peer.start("take")
    fabric.send(parts, header=b"\x00\xffheader", progress=moved.append)
    taken = fabric.peer.answer()
    assert (taken["source"], taken["header"], taken["sizes"]) == (0, b"\x00\xffheader".hex(), sizes)
    assert taken["digest"] == peers.xxh(*parts) and sum(moved) == sum(sizes)


def test_no_intermediate_buffer_stands_between_the_two_memories(fabric):
    fabric.peer.start("take")
    fabric.send([peers.pattern(0, LARGE)])
    assert fabric.peer.answer()["grown_kib"] < 24 * 1024


def test_send_returns_only_after_the_receiver_acknowledged(fabric):
    fabric.peer.start("send", peer=0, seed=1, sizes=[9])
    incoming = fabric.me.receive(timeout_s=20)
    buffer = bytearray(9)
    incoming.accept([memoryview(buffer)], timeout_s=20)
    with pytest.raises(queue.Empty):
        fabric.peer.answer(timeout_s=0.3)
    incoming.acknowledge(timeout_s=20)
    assert fabric.peer.answer() == {} and buffer == peers.pattern(1, 9)


@pytest.mark.parametrize(("decision", "said"), [("refuse at once", "no room"), ("refuse", "digest differs")])
def test_a_refusal_reaches_the_sender_with_its_reason_and_the_next_send_works(fabric, decision, said):
    fabric.peer.start("take", decision=decision)
    with pytest.raises(ReplicationError, match=said) as caught:
        fabric.send([b"x" * 100])
    assert caught.value.rank == 1 and fabric.peer.answer()["source"] == 0
    fabric.peer.start("take")
    fabric.send([b"y" * 100])
    assert fabric.peer.answer()["digest"] == peers.xxh(b"y" * 100)


def test_a_range_is_fetched_into_the_same_place_and_nothing_else_is_touched(fabric):
    sizes = [3, 9 * MIB, 0, 5]
    fabric.peer.ask("offer", key="k", seed=40, sizes=sizes)
    assert fabric.me.describe(1, "k", timeout_s=20) == (b"offered", tuple(sizes))
    whole = b"".join(peers.pattern(40 + i, size) for i, size in enumerate(sizes))
    for offset, length in ((0, len(whole)), (1, 5), (MIB, 7 * MIB + 1), (len(whole) - 6, 6), (17, 0)):
        buffers = [bytearray(b"\xee" * size) for size in sizes]
        fabric.me.fetch(1, "k", [memoryview(b) for b in buffers], offset=offset, length=length, timeout_s=20)
        expected = b"\xee" * offset + whole[offset : offset + length] + b"\xee" * (len(whole) - offset - length)
        assert b"".join(buffers) == expected, (offset, length)


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 11), (11, 0)])
def test_a_range_outside_the_offer_is_refused(fabric, offset, length):
    fabric.peer.ask("offer", key="ten", seed=1, sizes=[10])
    with pytest.raises(ReplicationError, match="no bytes"):
        fabric.me.fetch(1, "ten", [memoryview(bytearray(10))], offset=offset, length=length, timeout_s=20)


def test_what_is_not_offered_is_refused_by_name(fabric):
    with pytest.raises(ReplicationError, match="'missing'"):
        fabric.me.describe(1, "missing", timeout_s=20)
    with pytest.raises(ReplicationError, match="'missing'"):
        fabric.me.fetch(1, "missing", [memoryview(bytearray(1))], offset=0, length=1, timeout_s=20)


def test_a_withdrawn_offer_is_read_no_more(fabric):
    fabric.me.offer("mine", b"h", [memoryview(b"abc")], timeout_s=5)
    fabric.me.withdraw("mine", timeout_s=5)
    fabric.me.withdraw("mine", timeout_s=5)
    other = fabric.transport(2)
    try:
        with pytest.raises(ReplicationError, match="'mine'"):
            other.describe(0, "mine", timeout_s=20)
    finally:
        other.close(timeout_s=10)


def test_crossing_sends_all_arrive(fabric):
    rounds, size = 4, 40 * MIB
    fabric.peer.start("cross", peer=0, size=size, rounds=rounds)
    taken = []

    def take():
        for _ in range(rounds):
            incoming = fabric.me.receive(timeout_s=30)
            buffer = bytearray(incoming.sizes[0])
            incoming.accept([memoryview(buffer)], timeout_s=30)
            incoming.acknowledge(timeout_s=30)
            taken.append(peers.xxh(buffer))

    taker = threading.Thread(target=take)
    taker.start()
    for turn in range(rounds):
        fabric.send([peers.pattern(100 + turn, size)])
    taker.join(60)
    assert taken == [peers.xxh(peers.pattern(turn, size)) for turn in range(rounds)]
    assert fabric.peer.answer()["taken"] == [peers.xxh(peers.pattern(100 + turn, size)) for turn in range(rounds)]


def test_a_header_that_is_a_malicious_pickle_stays_bytes(fabric, tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    header = pickle.dumps(Bomb())
    fabric.peer.start("take")
    fabric.send([b"x"], header=header)
    assert fabric.peer.answer()["header"] == header.hex() and not (tmp_path / "ran").exists()


def test_a_header_over_the_cap_is_refused_before_anything_is_sent(fabric):
    with pytest.raises(ReplicationError, match=str(MAX_HEADER_BYTES)):
        fabric.send([b"x"], header=b"h" * (MAX_HEADER_BYTES + 1))
    assert fabric.peer.ask("take", timeout_s=0.5) == {"none": True}


def test_buffers_of_other_sizes_than_announced_are_refused(fabric):
    fabric.peer.start("send", peer=0, seed=1, sizes=[9])
    incoming = fabric.me.receive(timeout_s=20)
    with pytest.raises(ReplicationError, match="9"):
        incoming.accept([memoryview(bytearray(8))], timeout_s=20)
    incoming.refuse(ValueError("too small"), timeout_s=20)
    assert "too small" in fabric.peer.answer()["text"]


def test_memory_that_is_read_only_is_refused_and_does_not_kill_the_process(fabric):
    readonly = memoryview(bytes(9))
    fabric.peer.start("send", peer=0, seed=1, sizes=[9])
    incoming = fabric.me.receive(timeout_s=20)
    with pytest.raises(ReplicationError, match="read-only"):
        incoming.accept([readonly], timeout_s=20)
    incoming.refuse(ValueError("read-only"), timeout_s=20)
    assert "read-only" in fabric.peer.answer()["text"]
    fabric.peer.ask("offer", key="nine", seed=1, sizes=[9])
    with pytest.raises(ReplicationError, match="read-only"):
        fabric.me.fetch(1, "nine", [readonly], offset=0, length=9, timeout_s=20)


def test_a_process_that_ends_without_close_ends_cleanly(fabric):
    fabric.peer.stop()
    fabric.restart(script=True).start("take")
    fabric.send([b"x" * 100])
    fabric.peer.answer()
    fabric.peer.start("send", peer=0, seed=1, sizes=[9])
    incoming = fabric.me.receive(timeout_s=20)
    incoming.accept([memoryview(bytearray(9))], timeout_s=20)
    incoming.acknowledge(timeout_s=20)
    assert fabric.peer.answer() == {}
    fabric.peer.start("leave")
    fabric.peer.process.join(60)
    assert fabric.peer.process.exitcode == 0
    fabric.restart()


def test_a_peer_that_takes_nothing_is_an_error_at_the_deadline_and_the_next_send_works(fabric):
    with pytest.raises(DeadlineExceededError, match="rank 1") as caught:
        fabric.send([b"x" * MIB], timeout_s=1.0)
    assert caught.value.rank == 1
    # the peer finds the shard that nobody waits for any more, and says so; or it knows already that there is none
    taken = fabric.peer.ask("take", timeout_s=3)
    assert taken == {"none": True} or taken["error"] in ("PeerError", "DeadlineExceededError")
    fabric.peer.start("take")
    fabric.send([b"z" * MIB])
    assert fabric.peer.answer()["digest"] == peers.xxh(b"z" * MIB)


def test_a_receiver_that_stalls_in_the_middle_is_an_error_at_the_deadline_and_the_next_send_works(fabric):
    def stalled(sizes):
        fabric.peer.start("take", timeout_s=20)
        try:
            fabric.send(
                [peers.pattern(3, size) for size in sizes],
                timeout_s=3.0,
                progress=once(lambda: fabric.peer.signal(signal.SIGSTOP)),
            )
        finally:
            fabric.peer.signal(signal.SIGCONT)
            taken.append(fabric.peer.answer())

    taken = []
    with pytest.raises(DeadlineExceededError, match="rank 1"):
        cut_off(stalled)
    assert taken[-1]["error"] in ("PeerError", "DeadlineExceededError")
    fabric.peer.start("take")
    fabric.send([peers.pattern(4, MIB)])
    assert fabric.peer.answer()["digest"] == peers.xxh(peers.pattern(4, MIB))


def test_a_sender_that_stalls_in_the_middle_lets_go_of_the_receivers_buffer_for_good(fabric):
    def stalled(sizes):
        fabric.peer.start("send", peer=0, seed=5, sizes=sizes, timeout_s=3.0, signal_self=signal.SIGSTOP)
        incoming = fabric.me.receive(timeout_s=20)
        buffers[:] = [bytearray(size) for size in sizes]
        try:
            incoming.accept(list(map(memoryview, buffers)), timeout_s=3.0)
            incoming.refuse(ValueError("all has come"), timeout_s=3.0)
        finally:
            buffers[-1][:] = b"\xcc" * sizes[-1]
            fabric.peer.signal(signal.SIGCONT)
            sent.append(fabric.peer.answer())

    buffers, sent = [], []
    with pytest.raises(DeadlineExceededError, match="rank 1"):
        cut_off(stalled)
    assert sent[-1]["error"] in ("PeerError", "DeadlineExceededError")
    if fabric.kind == "gloo":
        assert buffers[-1].count(0xCC) == len(buffers[-1])
    buffer = bytearray(MIB)
    fabric.peer.start("send", peer=0, seed=6, sizes=[MIB])
    incoming = fabric.me.receive(timeout_s=20)
    incoming.accept([memoryview(buffer)], timeout_s=20)
    incoming.acknowledge(timeout_s=20)
    assert fabric.peer.answer() == {} and buffer == peers.pattern(6, MIB)


@pytest.mark.parametrize("fabric", ["mooncake"], indirect=True)
def test_memory_that_a_stalled_sender_may_still_write_to_takes_nothing_else_until_it_is_done(fabric):
    fabric.peer.start("send", peer=0, seed=5, sizes=[1, HUGE], timeout_s=3.0, signal_self=signal.SIGSTOP)
    buffer = bytearray(HUGE)
    with pytest.raises(DeadlineExceededError):
        fabric.me.receive(timeout_s=20).accept([memoryview(bytearray(1)), memoryview(buffer)], timeout_s=3.0)
    other = fabric.transport(2)
    sender = threading.Thread(target=_send_quietly, args=(other,))
    sender.start()
    incoming = fabric.me.receive(timeout_s=20)
    with pytest.raises(ReplicationError, match="rank 1 may still write"):
        incoming.accept([memoryview(buffer)[:9]], timeout_s=3.0)
    incoming.refuse(ValueError("busy"), timeout_s=3.0)
    sender.join(20)
    other.close(timeout_s=5)
    fabric.peer.signal(signal.SIGCONT)
    assert fabric.peer.answer()["error"] == "DeadlineExceededError"
    assert any(not fabric.me.lending._out_of_bounds or threading.Event().wait(0.1) for _ in range(400))
    fabric.peer.start("send", peer=0, seed=6, sizes=[HUGE])
    incoming = fabric.me.receive(timeout_s=20)
    incoming.accept([memoryview(buffer)], timeout_s=20)
    incoming.acknowledge(timeout_s=20)
    assert fabric.peer.answer() == {} and buffer == peers.pattern(6, HUGE)


def _send_quietly(transport):
    with contextlib.suppress(ReplicationError):
        transport.send(0, b"h", [memoryview(b"x" * 9)], timeout_s=20)


def test_a_receiver_killed_in_the_middle_is_an_error_and_its_successor_gets_the_next_shard(fabric):
    def killed(sizes):
        fabric.restart().start("take")
        fabric.send(
            [peers.pattern(7, size) for size in sizes],
            timeout_s=60.0,
            progress=once(lambda: fabric.peer.signal(signal.SIGKILL)),
        )

    # not at the deadline, which is what gloo itself would leave it to
    with pytest.raises(PeerError, match="rank 1"):
        cut_off(killed)
    with pytest.raises((PeerError, DeadlineExceededError), match="rank 1"):
        fabric.send([b"nobody is there"], timeout_s=1.0)
    # it may find first what was sent while nobody was there, and whose sender has given up
    fabric.restart().start("take_one_that_comes")
    fabric.send([peers.pattern(8, MIB)])
    assert fabric.peer.answer()["digest"] == peers.xxh(peers.pattern(8, MIB))


def test_a_sender_killed_in_the_middle_is_an_error_and_its_successor_is_heard(fabric):
    def killed(sizes):
        fabric.restart().start("send", peer=0, seed=9, sizes=sizes, timeout_s=60.0, signal_self=signal.SIGKILL)
        incoming = fabric.me.receive(timeout_s=20)
        room = [memoryview(bytearray(size)) for size in sizes]
        incoming.accept(room, timeout_s=60 if fabric.kind == "gloo" else 3)

    # Mooncake writes into our memory without our doing, and only its silence tells
    expected = PeerError if fabric.kind == "gloo" else DeadlineExceededError
    with pytest.raises(expected, match="rank 1"):
        cut_off(killed)
    fabric.restart().start("send", peer=0, seed=10, sizes=[MIB])
    buffer = bytearray(MIB)
    incoming = fabric.me.receive(timeout_s=20)
    incoming.accept([memoryview(buffer)], timeout_s=20)
    incoming.acknowledge(timeout_s=20)
    assert fabric.peer.answer() == {} and buffer == peers.pattern(10, MIB)


@pytest.mark.parametrize(
    ("field", "value"), [("protocol", 99), ("job_id", "another"), ("group", "other"), ("incarnation", 2)]
)
def test_a_peer_of_another_version_or_job_is_refused_by_name(fabric, field, value):
    stranger = fabric.transport(3, **{field: value})
    try:
        with pytest.raises(PeerError, match=f"{field} {value!r}"):
            stranger.send(1, b"h", [memoryview(b"x")], timeout_s=20)
        with pytest.raises(PeerError, match=field):
            fabric.me.send(3, b"h", [memoryview(b"x")], timeout_s=20)
    finally:
        stranger.close(timeout_s=10)


def test_close_ends_every_call_in_progress_and_leaves_no_thread(fabric):
    before = set(threading.enumerate())
    mine = fabric.transport(4)
    ended = []

    def call(function, *arguments, **keywords):
        try:
            ended.append(function(*arguments, **keywords))
        except (PeerError, ReplicationError) as error:
            ended.append(error)

    fabric.peer.ask("ready")
    buffer = memoryview(bytearray(MIB))
    calls = [
        threading.Thread(target=call, args=(mine.receive,), kwargs={"timeout_s": 60}),
        threading.Thread(target=call, args=(mine.send, 1, b"h", [buffer]), kwargs={"timeout_s": 60}),
        threading.Thread(target=call, args=(mine.send, 77, b"h", [buffer]), kwargs={"timeout_s": 60}),
    ]
    for thread in calls:
        thread.start()
    threading.Event().wait(0.5)
    mine.close(timeout_s=10)
    for thread in calls:
        thread.join(20)
    assert len(ended) == 3 and None in ended and sum(isinstance(end, PeerError) for end in ended) == 2
    assert mine.receive(timeout_s=5) is None
    mine.close(timeout_s=5)
    left = {thread for thread in set(threading.enumerate()) - before if "mlflashpoint" in thread.name}
    assert not left
    # the peer may still hold the shard that was never accepted: whoever looks finds that its sender is gone
    assert set(fabric.peer.ask("take", timeout_s=2)) & {"error", "none"}


def test_a_closed_peer_process_has_no_thread_left(fabric):
    names = fabric.peer.ask("close")["names"]
    assert not [name for name in names if "mlflashpoint" in name]
    fabric.peer.stop()
    fabric.restart()
