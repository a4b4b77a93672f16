import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.plan import plan_recovery
from mlflashpoint.core.record import DRAIN_NODE, ShardCopy, ShardRecord


def copy(step, rank, *, world=2, incarnation=1, node=None, holder=None, slot=None, replica=False, **more):
    record = ShardRecord(
        job_id="j",
        group=more.pop("group", "default"),
        incarnation=incarnation,
        step=step,
        rank=rank,
        world_size=world,
        topology=more.pop("topology", ""),
        index_bytes=1,
        index_digest="d",
        data_bytes=1,
        created_s=more.pop("created_s", float(step)),
        resumed_from=more.pop("resumed_from", -1),
        run=more.pop("run", f"run-{incarnation}"),
    )
    assert not more
    holder = rank if holder is None else holder
    where = slot or f"default/seat-{holder}/{'replica' if replica else 'slot'}-{step}"
    return ShardCopy(record, f"n{holder}" if node is None else node, holder, where, replica)


def version(step, *, world=2, **more):
    return [copy(step, rank, world=world, **more) for rank in range(world)]


PLACE = {0: "n0", 1: "n1"}


def reasons(plan):
    return {(item.incarnation, item.step): item.reason for item in plan.skipped}


def test_the_newest_complete_version_is_chosen_by_number():
    plan = plan_recovery([*version(9), *version(100), *version(10)], 2, placement=PLACE)
    assert (plan.step, plan.incarnation, plan.skipped) == (100, 1, ())
    assert {rank: [c.record.rank for c in copies] for rank, copies in plan.sources.items()} == {0: [0], 1: [1]}


def test_an_incomplete_version_is_skipped_with_a_reason():
    plan = plan_recovery([*version(3), copy(4, 0)], 2, placement=PLACE)
    assert plan.step == 3
    assert reasons(plan) == {(1, 4): "no copy of the shards of rank 1"}


def test_a_replica_completes_a_version():
    plan = plan_recovery([copy(4, 0), copy(4, 1, holder=0, replica=True)], 2, placement=PLACE)
    assert plan.step == 4


def test_shards_of_different_starts_never_make_a_version():
    plan = plan_recovery([copy(4, 0, incarnation=1), copy(4, 1, incarnation=2)], 2, placement=PLACE)
    assert plan.step == -1


def test_shards_of_two_starts_that_took_one_number_never_make_a_version():
    plan = plan_recovery([copy(4, 0, run="a"), copy(4, 1, run="b")], 2, placement=PLACE)
    assert plan.step == -1


def test_shards_of_different_layouts_never_make_a_version():
    plan = plan_recovery([copy(4, 0, topology="tp1"), copy(4, 1, topology="tp2")], 2, placement=PLACE)
    assert plan.step == -1


def test_after_a_rollback_the_stale_newer_version_never_wins():
    lineage = Lineage.of([Incarnation(1, "run-1", 0.0, -1), Incarnation(2, "run-2", 50.0, 20)])
    plan = plan_recovery([*version(40), *version(20)], 2, placement=PLACE, lineage=lineage)
    assert plan.step == 20
    assert "abandoned" in reasons(plan)[1, 40]


def test_a_commit_record_alone_tells_that_an_older_version_is_abandoned():
    copies = [*version(40), *version(20), copy(30, 0, incarnation=2, resumed_from=20)]
    plan = plan_recovery(copies, 2, placement=PLACE)
    assert plan.step == 20
    assert "abandoned" in reasons(plan)[1, 40]


def test_the_version_that_a_later_start_went_on_from_stays_good():
    copies = [*version(20), copy(30, 0, incarnation=2, resumed_from=20)]
    assert plan_recovery(copies, 2, placement=PLACE).step == 20


def test_of_one_step_the_later_start_wins():
    copies = [*version(20), *version(20, incarnation=2, resumed_from=20)]
    assert plan_recovery(copies, 2, placement=PLACE).incarnation == 2


def test_a_durable_checkpoint_that_is_newer_wins_and_the_memory_stays_protected():
    plan = plan_recovery(version(20), 2, placement=PLACE, durable_step=21)
    assert (plan.step, plan.complete[0].step) == (-1, 20)
    assert "durable checkpoint of step 21" in reasons(plan)[1, 20]


def test_memory_wins_a_tie_with_a_durable_checkpoint():
    assert plan_recovery(version(20), 2, placement=PLACE, durable_step=20).step == 20


def test_a_bad_copy_is_passed_over_for_the_next_and_then_for_the_next_older_version():
    own, replica = copy(8, 1), copy(8, 1, holder=0, replica=True)
    copies = [copy(8, 0), own, replica, *version(7)]
    bad = {(own.node, own.slot)}
    plan = plan_recovery(copies, 2, placement=PLACE, excluded=bad)
    assert (plan.step, plan.sources[1]) == (8, (replica,))
    plan = plan_recovery(copies, 2, placement=PLACE, excluded=bad | {(replica.node, replica.slot)})
    assert plan.step == 7
    assert reasons(plan)[1, 8] == "no copy of the shards of rank 1 (2 copies bad or out of reach)"


def test_another_world_size_is_reported_for_resharding_and_not_loaded():
    plan = plan_recovery([*version(5), *version(9, world=4, node="n0")], 2, placement=PLACE)
    assert plan.step == 5
    assert plan.reshardable.step == 9
    assert "TopologyMismatch: saved by 4 ranks, the job has 2" in reasons(plan)[1, 9]
    assert plan.complete[0].step == 9


def test_another_layout_is_reported_for_resharding_and_not_loaded():
    plan = plan_recovery(version(5, topology="tp2"), 2, placement=PLACE, topology="tp1")
    assert (plan.step, plan.reshardable.topology) == (-1, "tp2")
    assert "'tp2', the job has 'tp1'" in reasons(plan)[1, 5]


def test_another_world_size_is_chosen_when_resharding_is_allowed():
    copies = [copy(9, rank, world=4, node="n0", holder=rank % 2) for rank in range(4)]
    plan = plan_recovery(copies, 2, placement={0: "n0", 1: "n0"}, reshard=True, remote=False)
    assert (plan.step, plan.version.world_size, sorted(plan.sources)) == (9, 4, [0, 1, 2, 3])


def test_without_a_way_to_other_nodes_a_shard_there_does_not_count():
    copies = [*version(8), copy(6, 0), copy(6, 1)]
    swapped = {0: "n1", 1: "n0"}
    assert plan_recovery(copies, 2, placement=PLACE, remote=False).step == 8
    plan = plan_recovery(copies, 2, placement=swapped, remote=False)
    assert plan.step == -1
    assert reasons(plan)[1, 8] == "only other nodes hold the shards of ranks 0, 1"
    assert plan_recovery(copies, 2, placement=swapped, remote=True).step == 8


def test_other_groups_do_not_mix():
    copies = [*version(8, group="actor"), *version(3)]
    assert plan_recovery(copies, 2, placement=PLACE).step == 3
    assert plan_recovery(copies, 2, placement=PLACE, group="actor").step == 8


def test_nothing_in_memory_is_said_so():
    plan = plan_recovery([], 2, placement=PLACE)
    assert (plan.step, plan.sources, plan.reason) == (-1, {}, "nothing to recover from memory, it holds no version")


def test_sources_are_ordered_own_seat_own_node_other_nodes_replicas():
    place = {0: "n0", 1: "n0", 2: "n1"}
    candidates = [
        copy(5, 0, world=3, node="n1", holder=2, replica=True, slot="default/seat-0/replica-0"),
        copy(5, 0, world=3, node="n1", holder=2, slot="default/seat-0/slot-0"),
        copy(5, 0, world=3, node="n0", holder=1, slot="default/seat-1/slot-0"),
        copy(5, 0, world=3, node="n0", holder=0, slot="default/seat-0/slot-0"),
    ]
    rest = [copy(5, 1, world=3, node="n0"), copy(5, 2, world=3, node="n1")]
    for order in itertools.permutations(candidates):
        plan = plan_recovery([*order, *rest], 3, placement=place)
        assert list(plan.sources[0]) == candidates[::-1]


# -- properties: against a reference that tries everything the slow and obvious way --

copies_strategy = st.lists(
    st.builds(
        lambda step, rank, world, incarnation, holder, replica, resumed: copy(
            step,
            rank % world,
            world=world,
            incarnation=incarnation,
            holder=holder,
            replica=replica,
            resumed_from=resumed[incarnation - 1],
        ),
        step=st.integers(0, 4),
        rank=st.integers(0, 2),
        world=st.sampled_from([2, 2, 3]),
        incarnation=st.integers(1, 3),
        holder=st.integers(0, 2),
        replica=st.booleans(),
        resumed=st.shared(st.tuples(st.just(-1), st.integers(-1, 4), st.integers(-1, 4)), key="resumed"),
    ),
    max_size=24,
    unique_by=lambda c: (c.node, c.slot, c.record),
)


def reference(copies, world, durable, excluded, resumed):
    good = [c for c in copies if (c.node, c.slot) not in excluded]
    said = {c.record.incarnation: c.record.resumed_from for c in good}
    found = []
    for incarnation, step in {(c.record.incarnation, c.record.step) for c in good}:
        mine = [
            c for c in good if (c.record.incarnation, c.record.step, c.record.world_size) == (incarnation, step, world)
        ]
        if {c.record.rank for c in mine} != set(range(world)):
            continue
        if any(step > r for later, r in said.items() if later > incarnation):
            continue
        if durable is not None and durable > step:
            continue
        found.append((incarnation, step))
    return max(found, default=None)


@settings(max_examples=300)
@given(copies_strategy, st.none() | st.integers(0, 5), st.data())
def test_the_plan_is_the_newest_version_that_can_be_put_together(copies, durable, data):
    excluded = set(
        data.draw(st.lists(st.sampled_from([(c.node, c.slot) for c in copies]), max_size=3)) if copies else []
    )
    place = {0: "n0", 1: "n1"}
    plan = plan_recovery(copies, 2, placement=place, durable_step=durable, excluded=excluded)
    expected = reference(copies, 2, durable, excluded, None)
    assert (None if plan.step < 0 else (plan.incarnation, plan.step)) == expected
    if plan.step < 0:
        assert plan.sources == {}
        return
    assert sorted(plan.sources) == [0, 1]
    for rank, sources in plan.sources.items():
        assert sources
        for source in sources:
            assert (source.record.rank, source.record.step) == (rank, plan.step)
            assert (source.node, source.slot) not in excluded
        distances = [0 if c.node == place[rank] else 3 if c.replica else 2 for c in sources]
        assert distances == sorted(distances)


@given(copies_strategy, st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_manifests(copies, random):
    shuffled = copies[:]
    random.shuffle(shuffled)
    one, other = (plan_recovery(c, 2, placement=PLACE) for c in (copies, shuffled))
    assert (one.version, one.skipped, one.complete) == (other.version, other.skipped, other.complete)


def test_ten_thousand_nodes_less_one_are_planned():
    """80,000 ranks, two versions, two copies: the right version, and a source for each rank."""
    nodes, per_node = 10_000, 8
    world = nodes * per_node
    place = {rank: f"n{rank // per_node}" for rank in range(world)}
    lost = place[777]
    copies = []
    for step in (90, 100):
        for rank in range(world):
            peer = (rank + per_node) % world
            copies.append(
                copy(step, rank, world=world, node=place[rank], holder=rank, slot=f"default/seat-0/slot-{step}")
            )
            copies.append(
                copy(
                    step,
                    rank,
                    world=world,
                    node=place[peer],
                    holder=peer,
                    replica=True,
                    slot=f"default/seat-0/replica-{step}",
                )
            )
    copies = [c for c in copies if c.node != lost]
    plan = plan_recovery(copies, world, placement=place)
    assert (plan.step, len(plan.sources)) == (100, world)
    assert plan.sources[777][0].replica
    assert not plan.sources[776 + 8][0].replica


def test_what_was_chosen_is_said_to_lie_where_it_lies():
    def said(*copies, remote=True):
        plan = plan_recovery(copies, 2, placement=PLACE, remote=remote)
        return plan.reason.removeprefix("step 4 of incarnation 1 is complete in "), plan.place

    memory, drained = version(4), version(4, node=DRAIN_NODE)
    assert said(*memory) == said(*memory, *drained) == ("memory", "memory")
    assert said(*drained) == ("the drain directory",) * 2
    both = "memory and the drain directory"
    assert said(memory[0], *drained) == (f"{both} (there the shard of rank 1)", both)
    # In a job without replicas a shard in another node's memory is out of reach.
    assert said(copy(4, 0), copy(4, 1, node="n0"), *drained, remote=False)[1] == both
    assert said(copy(4, 0), copy(4, 1, node="n0"), *drained)[1] == "memory"
