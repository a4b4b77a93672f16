"""A rank leaves out its table only if the coordinator still has the very one, whatever else is under way."""

import itertools

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from mlflashpoint.adapter.pytorch.metadata_codec import decode_metadata
from mlflashpoint.adapter.pytorch.tables import Tables
from mlflashpoint.errors import PeerError


def plan(*names):
    return SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in names])


def metadata(*names):
    return Metadata({name: BytesStorageMetadata() for name in names})


SMALL, FULL = plan("a"), plan("a", "b")


def told(tables, of, *, here=False):
    return tables.describe(of, 1, here=here)


def test_a_confirmed_table_is_left_out_of_the_next_save():
    tables = Tables()
    _, table, sent = told(tables, SMALL)
    assert table.items is not None
    tables.confirm(sent)
    assert told(tables, SMALL)[1].items is None


def test_a_table_that_nobody_has_confirmed_is_sent_again():
    tables = Tables()
    told(tables, SMALL)
    assert told(tables, SMALL)[1].items is not None


def test_a_confirmation_that_comes_after_another_table_was_sent_counts_no_more():
    tables = Tables()
    first = told(tables, SMALL)[2]
    told(tables, FULL)
    tables.confirm(first)
    assert told(tables, SMALL)[1].items is not None


def test_a_failed_save_makes_the_next_one_send_the_whole_table():
    tables = Tables()
    tables.confirm(told(tables, SMALL)[2])
    tables.doubt(told(tables, SMALL)[2])
    assert told(tables, SMALL)[1].items is not None


def test_what_a_rank_has_told_itself_the_coordinator_of_all_does_not_know():
    tables = Tables()
    tables.confirm(told(tables, SMALL, here=True)[2])
    assert told(tables, SMALL)[1].items is not None


def test_equal_texts_of_other_items_are_other_tables():
    tables = Tables()
    tables.confirm(told(tables, plan("a!\nb"))[2])
    assert told(tables, plan("a", "b"))[1].items is not None


@pytest.mark.parametrize("structures", list(itertools.product((SMALL, FULL), repeat=4)))
def test_no_order_of_saves_and_confirmations_leaves_the_coordinator_without_a_table(structures):
    # The coordinator takes the tables in the order of the saves; a confirmation comes at any time after that.
    for due in itertools.product(range(5), repeat=4):
        coordinator, rank = Tables(), Tables()
        waiting = {}
        for number, of in enumerate(structures):
            _, table, sent = told(rank, of)
            names = [item.index.fqn for item in of.items]
            encoded = coordinator.encode(metadata(*names), [table], step=number, path="/x")
            assert {name for name, _ in decode_metadata(encoded).holders} == set(names)
            waiting[number] = sent
            for earlier in [earlier for earlier in waiting if earlier + due[earlier] <= number]:
                rank.confirm(waiting.pop(earlier))


def test_a_missing_table_is_an_error_that_names_step_path_and_remedy():
    rank = Tables()
    rank.confirm(told(rank, SMALL)[2])
    with pytest.raises(PeerError, match=r"rank 1 .*step 7.*/base/step-7_ckpt.*remedy: .*save again"):
        Tables().encode(metadata("a"), [told(rank, SMALL)[1]], step=7, path="/base/step-7_ckpt")
