import dataclasses
import threading
import time

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.room import Room
from mlflashpoint.core.roster import Member, join
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError


def together(world, action, *, missing=(), store=None):
    """Run ``action(rank, channel)`` as every rank but the missing ones; their results or errors by rank."""
    store, results = store or dist.HashStore(), {}

    def run(rank):
        try:
            results[rank] = action(rank, Channel(store, "group"))
        except FlashpointError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def member(rank, node="n", seen=0, **more):
    return Member(rank=rank, seat=rank, node=node, domain="d", seen=seen, job_id="j", **more)


def joining(world, *, nodes=None, seen=None, lineages=None, deadline_s=20):
    """An action that joins."""

    def act(rank, channel):
        me = member(rank, nodes[rank] if nodes else "n", seen[rank] if seen else 0)
        return join(channel, me, lineages[rank] if lineages else Lineage(), world_size=world, deadline_s=deadline_s)

    return act


def test_all_ranks_learn_one_number_above_all_that_were_seen_on_any_node():
    lineages = [Lineage(), Lineage(), Lineage.of([Incarnation(9, "r", 0.0, None)])]
    joined = together(3, joining(3, seen=[0, 7, 3], lineages=lineages))
    assert {result.start.number for result in joined.values()} == {10}
    assert len({result.start.run for result in joined.values()}) == 1


def test_the_lowest_rank_of_each_node_leads_it_and_rank_0_knows_all():
    joined = together(4, joining(4, nodes=["a", "b", "a", "b"]))
    assert [joined[rank].me.leader for rank in range(4)] == [True, True, False, False]
    assert joined[0].members == tuple(joined[rank].me for rank in range(4))
    assert joined[1].members == ()


def test_a_rank_without_a_container_leads_no_node():
    joined = together(2, joining(2, nodes=["a", ""]))
    assert (joined[0].me.leader, joined[1].me.leader) == (True, False)


@pytest.mark.parametrize(
    ("missing", "named"), [((2,), "rank 2 did not answer"), ((1, 2), "ranks 1, 2 did"), ((0,), "rank 0 did")]
)
def test_ranks_that_do_not_come_are_named_to_all_the_others(missing, named):
    joined = together(3, joining(3, deadline_s=0.5), missing=missing)
    assert len(joined) == 3 - len(missing)
    for error in joined.values():
        assert isinstance(error, DeadlineExceededError)
        assert named in str(error)
        assert "MLFLASHPOINT_DEADLINE_S" in str(error)


@pytest.mark.parametrize("died", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_a_start_in_a_store_that_holds_an_earlier_ones_keys_takes_none_of_them_for_a_rank(died):
    """torchrun may keep the store over a restart; some ranks of the first start died before they had joined."""
    store = dist.HashStore()
    first = together(3, joining(3, deadline_s=0.3), missing=died, store=store)
    started = time.monotonic()
    second = together(3, joining(3, nodes=["x", "y", "y"], deadline_s=60), store=store)
    assert time.monotonic() - started < 20
    assert len({result.start for result in second.values()}) == 1
    assert second[0].start not in [getattr(result, "start", None) for result in first.values()]
    assert [second[rank].me.leader for rank in range(3)] == [True, True, False]
    assert {found.node for found in second[0].members} == {"x", "y"}


def test_a_rank_that_restarts_alone_while_the_others_are_joining_is_waited_for():
    store = dist.HashStore()
    stale = threading.Thread(
        target=together, args=(3, joining(3, deadline_s=0.5)), kwargs={"missing": (0, 1), "store": store}
    )
    stale.start()
    stale.join(30)

    def late(rank, channel):
        time.sleep(0.3 * rank)
        return joining(3, deadline_s=30)(rank, channel)

    assert len({result.start for result in together(3, late, store=store).values()}) == 1


def room(world, action, *, deadline_s, missing=()):
    def act(rank, channel):
        return action(Room(channel, rank=rank, world_size=world, deadline_s=deadline_s))

    return together(world, act, missing=missing)


def test_ranks_that_do_not_arrive_in_a_room_are_named():
    def act(here):
        here.arrive("listed")
        here.all_arrived("listed")

    for error in room(3, act, deadline_s=0.5, missing=(1,)).values():
        assert "rank 1 did not answer (listed)" in str(error)


@pytest.mark.parametrize("odd", [{"job_id": "other"}, {"protocol": 99}])
def test_a_rank_of_another_job_or_release_is_named_to_all(odd):
    def act(rank, channel):
        me = dataclasses.replace(member(rank), **(odd if rank == 1 else {}))
        return join(channel, me, Lineage(), world_size=3, deadline_s=30)

    for error in together(3, act).values():
        assert isinstance(error, PeerError)
        assert "rank 1 is of job" in str(error)


def test_a_rank_that_gives_up_ends_the_conversation_for_all_at_once():
    def act(here):
        if here.rank == 1:
            here.call_off("rank 1: out of memory")
            return None
        return here.until(lambda: None, lambda: "nothing happened")

    results = room(3, act, deadline_s=60)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerError)
        assert "out of memory" in str(results[rank])


def test_a_malformed_entry_is_an_error_and_no_crash():
    with pytest.raises(PeerError, match="malformed"):
        Member.from_json({"rank": 0})
