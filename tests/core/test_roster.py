import threading

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.roster import Member, Room, join
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError


def together(world, action, *, missing=(), deadline_s=10):
    """Run ``action(room)`` as every rank but the missing ones; their results or errors by rank."""
    store, results = dist.HashStore(), {}

    def run(rank):
        room = Room(Channel(store, "room"), rank=rank, world_size=world, deadline_s=deadline_s)
        try:
            results[rank] = action(room)
        except FlashpointError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def member(rank, node="n", seen=0):
    return Member(rank=rank, seat=rank, node=node, domain="d", seen=seen)


def test_all_ranks_learn_one_number_above_all_that_were_seen_on_any_node():
    seen = [0, 7, 3]
    lineages = [Lineage(), Lineage(), Lineage.of([Incarnation(9, "r", 0.0, None)])]
    joined = together(3, lambda room: join(room, member(room.rank, seen=seen[room.rank]), lineages[room.rank]))
    assert {result.start.number for result in joined.values()} == {10}
    assert len({result.start.run for result in joined.values()}) == 1


def test_each_node_has_one_leader_and_rank_0_knows_all():
    nodes = ["a", "b", "a", "b"]
    joined = together(4, lambda room: join(room, member(room.rank, node=nodes[room.rank]), Lineage()))
    leaders = [result.me.node for result in joined.values() if result.me.leader]
    assert sorted(leaders) == ["a", "b"]
    assert joined[0].members == tuple(joined[rank].me for rank in range(4))
    assert joined[1].members == ()


def test_a_rank_without_a_container_leads_no_node():
    joined = together(2, lambda room: join(room, member(room.rank, node="a" if room.rank == 0 else ""), Lineage()))
    assert (joined[0].me.leader, joined[1].me.leader) == (True, False)


@pytest.mark.parametrize(
    ("missing", "named"), [((2,), "rank 2 did not answer"), ((1, 2), "ranks 1, 2 did"), ((0,), "rank 0 did")]
)
def test_ranks_that_do_not_come_are_named_to_all_the_others(missing, named):
    joined = together(3, lambda room: join(room, member(room.rank), Lineage()), missing=missing, deadline_s=0.5)
    assert len(joined) == 3 - len(missing)
    for error in joined.values():
        assert isinstance(error, DeadlineExceededError)
        assert named in str(error)
        assert "MLFLASHPOINT_DEADLINE_S" in str(error)


def test_a_rank_that_gives_up_ends_the_conversation_for_all_at_once():
    def act(room):
        if room.rank == 1:
            room.call_off("rank 1: out of memory")
            return None
        return room.until(lambda: None, lambda: "nothing happened")

    results = together(3, act, deadline_s=60)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerError)
        assert "out of memory" in str(results[rank])


def test_a_malformed_entry_is_an_error_and_no_crash():
    with pytest.raises(PeerError, match="malformed"):
        Member.from_json({"rank": 0})
