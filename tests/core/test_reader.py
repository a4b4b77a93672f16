import collections
import os
from pathlib import Path

import pytest
import torch

from mlflashpoint.core import slotfiles
from mlflashpoint.core.arena import file_of
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.errors import (
    ContainerError,
    FlashpointError,
    ShardCorruptError,
    ShardFormatError,
    StateMismatchError,
)
from tests.core.shard_helpers import differences, save


def make():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300, 400))
    return {
        "model": {"w": weight, "tied": weight, "b": torch.randn(7).bfloat16(), "turned": torch.randn(5, 6).t()},
        "optimizer": [{"step": 3, "exp_avg": torch.randn(300, 400)}, {"step": 3, "exp_avg": torch.empty(0)}],
        "lr": 0.1,
    }


def blank():
    state = make()
    for tensor in (state["model"]["w"].data, state["model"]["b"], state["optimizer"][0]["exp_avg"]):
        tensor.zero_()
    state["model"]["turned"] = torch.zeros(6, 5)
    state["lr"] = 9.9
    return state


@pytest.fixture
def slot(seat):
    arena, _ = save(seat, make(), step=5)
    return arena.slots[0].path


@pytest.fixture
def reader(slot):
    with ShardReader.open(slot) as reader:
        yield reader


def test_a_loaded_state_is_a_copy(slot, reader):
    state = reader.state()
    assert differences(state, make()) == []
    with torch.no_grad():
        state["model"]["w"].zero_()
    reader.verify()
    assert differences(reader.state(), make()) == []


def test_loading_into_a_state_fills_its_own_tensors(reader):
    state = blank()
    for _ in range(2):
        result = reader.state(into=state)
        assert result["model"]["w"] is state["model"]["w"] is result["model"]["tied"]
        assert result["optimizer"][0]["exp_avg"] is state["optimizer"][0]["exp_avg"]
        assert differences(result, make()) == []
        assert state["lr"] == 9.9 and result["lr"] == 0.1
        state = blank()


def test_the_order_of_keys_does_not_matter_for_loading(reader):
    state = blank()
    state["model"] = dict(reversed(state["model"].items()))
    state = dict(reversed(state.items()))
    result = reader.state(into=state)
    assert result["model"]["w"] is state["model"]["w"]
    assert differences(result, make()) == []


def test_a_list_may_be_loaded_into_a_tuple_of_the_same_places(reader):
    state = blank()
    state["optimizer"] = tuple(state["optimizer"])
    assert differences(reader.state(into=state), make()) == []


def test_untied_tensors_are_both_filled_from_a_tied_one(reader):
    state = blank()
    state["model"]["tied"] = torch.nn.Parameter(torch.zeros(300, 400))
    reader.state(into=state)
    assert torch.equal(state["model"]["tied"], make()["model"]["w"])
    assert torch.equal(state["model"]["w"], make()["model"]["w"])


def test_a_tied_tensor_can_not_take_two_that_differ(seat):
    arena, _ = save(seat, {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(3)})
    one = torch.full((3,), 5.0)
    with ShardReader.open(arena.slots[0].path) as reader:
        with pytest.raises(StateMismatchError, match="b: wanted as one tensor with a"):
            reader.state(into={"a": one, "b": one, "c": one.clone()})
        assert torch.equal(one, torch.full((3,), 5.0))
        reader.state(into={"a": one, "b": torch.zeros(3), "c": one})
        assert torch.equal(one, torch.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["model"].update(w=torch.zeros(300, 401)),
            r"model\.w: stored float32\[300, 400\], wanted float32\[300, 401\]",
        ),
        (lambda s: s["model"].update(b=torch.zeros(7)), r"model\.b: stored bfloat16\[7\], wanted float32\[7\]"),
        (lambda s: s["model"].update(b=torch.zeros(7, 1).bfloat16()), r"wanted bfloat16\[7, 1\]"),
        (lambda s: s["model"].update(extra=torch.zeros(1)), r"model\.extra: not stored"),
        (lambda s: s["model"].pop("b"), r"model\.b: stored, not wanted"),
        (lambda s: s["optimizer"].pop(0), r"optimizer\[1\]\.exp_avg: stored, not wanted"),
        (lambda s: s["model"].update(b=torch.zeros(1).bfloat16().expand(7)), r"model\.b: wanted as an expanded tensor"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(reader, change, message):
    state = blank()
    change(state)
    with pytest.raises(StateMismatchError, match=message) as caught:
        reader.state(into=state)
    assert caught.value.step == 5 and "rank 0" in str(caught.value)
    assert not state["optimizer"][-1]["exp_avg"].any() and not state["model"]["turned"].any()


def test_only_the_first_differing_tensors_are_named(seat):
    arena, _ = save(seat, [torch.zeros(2)] * 1 + [torch.zeros(n + 1) for n in range(20)])
    with (
        ShardReader.open(arena.slots[0].path) as reader,
        pytest.raises(StateMismatchError, match=r"^21 tensors differ: .*; \.\.\.") as caught,
    ):
        reader.state(into=[torch.zeros(n + 2, 2) for n in range(21)])
    assert str(caught.value).count("stored float32") == 5


def test_a_missing_or_extra_optional_field_can_be_allowed(reader):
    state = blank()
    extra = state["model"]["extra"] = torch.full((2,), 4.0)
    del state["model"]["b"]
    result = reader.state(into=state, strict=False)
    assert differences(result, make()) == []
    assert torch.equal(extra, torch.full((2,), 4.0)) and result["model"]["w"] is state["model"]["w"]
    with pytest.raises(StateMismatchError):
        reader.state(into=state)


def test_a_plain_value_of_another_kind_is_no_mismatch(reader):
    state = blank()
    state["lr"], state["optimizer"][0]["step"] = None, "x"
    assert differences(reader.state(into=state), make()) == []


def test_leaves_are_loaded_into_too(seat):
    state = {"raw": b"abc" * 3000, "sparse": torch.eye(3).to_sparse(), "o": collections.OrderedDict(x=torch.ones(2))}
    arena, _ = save(seat, state)
    into = {
        "raw": b"xyz" * 3000,
        "sparse": (torch.eye(3) * 5).to_sparse(),
        "o": collections.OrderedDict(x=torch.zeros(2)),
    }
    with ShardReader.open(arena.slots[0].path) as reader:
        assert differences(reader.state(into=into), state) == []
    assert torch.equal(into["sparse"].to_dense(), torch.eye(3))


def test_single_tensors_and_parts_can_be_read_and_copied_out(reader):
    expected = make()["model"]["w"].detach()
    assert reader.names == ["model.w", "model.b", "model.turned", "optimizer[0].exp_avg", "optimizer[1].exp_avg"]
    assert torch.equal(reader.tensor("model.w"), expected)
    part = reader.tensor("model.w", (slice(10, 20), slice(0, 3)))
    assert torch.equal(part, expected[10:20, :3]) and part.is_contiguous()
    target = torch.zeros(20, 3)
    reader.copy_into("model.w", target[5:15], (slice(10, 20), slice(0, 3)))
    assert torch.equal(target[5:15], expected[10:20, :3]) and not target[:5].any() and not target[15:].any()
    assert torch.equal(reader.view("model.turned"), make()["model"]["turned"])
    assert reader.entry("model.b").dtype is torch.bfloat16
    with pytest.raises(StateMismatchError, match=r"stored float32\[10, 3\], wanted float32\[9, 3\]"):
        reader.copy_into("model.w", torch.zeros(9, 3), (slice(10, 20), slice(0, 3)))
    for attempt in (reader.tensor, reader.view, reader.entry, lambda name: reader.copy_into(name, target)):
        with pytest.raises(StateMismatchError, match=r"no tensor 'model\.nothing'"):
            attempt("model.nothing")


def test_a_copy_given_as_buffers_reads_the_same(slot):
    with ShardReader.open(slot) as reader:
        record = reader.record
    index, data = file_of(slot, "index").read_bytes(), file_of(slot, "data").read_bytes()
    for buffer in (data, bytearray(data), memoryview(data)):
        copy = ShardReader.from_buffers(record, index, buffer)
        copy.verify()
        assert differences(copy.state(), make()) == []
    with pytest.raises(ShardFormatError, match="bytes of data"):
        ShardReader.from_buffers(record, index, data[: record.data_bytes - 1])


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    with open(path, "r+b") as file:
        file.write(content)


@pytest.mark.parametrize(
    "name", ["model.w", "model.b", "model.turned", "optimizer[0].exp_avg"], ids=["large", "small", "turned", "last"]
)
@pytest.mark.parametrize("where", ["first", "last"])
def test_one_flipped_bit_is_noticed_and_its_tensor_named(slot, name, where):
    with ShardReader.open(slot) as reader:
        entry = reader.entry(name)
        reader.verify()
        flip(file_of(slot, "data"), entry.offset + (0 if where == "first" else entry.nbytes - 1))
        with pytest.raises(ShardCorruptError, match=rf"tensor {name!r}".replace("[", r"\[")) as caught:
            reader.verify()
        assert caught.value.step == 5 and caught.value.rank == 0


def test_a_flipped_bit_of_the_index_is_noticed_when_it_is_opened(slot):
    flip(file_of(slot, "index"), 40)
    with pytest.raises(ShardCorruptError, match="index"):
        ShardReader.open(slot)


@pytest.mark.parametrize("kind", ["commit", "index", "data"])
@pytest.mark.parametrize("damage", ["gone", "empty", "short", "folder", "holes"])
def test_a_damaged_file_is_a_named_error(slot, kind, damage):
    path = file_of(slot, kind)
    content = path.read_bytes()
    path.unlink()
    if damage == "empty":
        path.touch()
    elif damage == "short":
        path.write_bytes(content[:-1] if kind != "data" else content[:100])
    elif damage == "folder":
        path.mkdir()
    elif damage == "holes":
        path.touch()
        os.truncate(path, len(content))
    with pytest.raises((ShardFormatError, ShardCorruptError, ContainerError)) as caught:
        ShardReader.open(slot).verify()
    assert slot.name in str(caught.value)


def test_an_index_that_claims_to_be_huge_is_not_read(slot, monkeypatch):
    monkeypatch.setattr(slotfiles, "MAX_INDEX_BYTES", 100)
    with pytest.raises(FlashpointError, match="bytes"):
        ShardReader.open(slot)


def test_a_closed_reader_says_so(slot):
    def mapped():
        return Path("/proc/self/maps").read_text().count(str(file_of(slot, "data")))

    others = mapped()
    reader = ShardReader.open(slot)
    reader.state()
    assert mapped() == others + 1
    reader.close()
    reader.close()
    assert mapped() == others
    for attempt in (reader.state, reader.verify, lambda: reader.tensor("model.w")):
        with pytest.raises(ContainerError, match="closed"):
            attempt()


def test_reading_leaves_the_files_as_they_are(slot):
    def look():
        return sorted((path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in slot.parent.iterdir())

    before = look()
    with ShardReader.open(slot) as reader:
        reader.verify()
        reader.view("model.b").zero_()
        state = reader.state(into=blank())
        state["lr"] = 0
    assert look() == before


def test_a_rank_without_tensors_has_a_shard_too(seat):
    arena, record = save(seat, {"rank": 3, "nothing": {}})
    assert record.data_bytes == 0
    with ShardReader.open(arena.slots[0].path) as reader:
        reader.verify()
        assert reader.state() == {"rank": 3, "nothing": {}} == reader.state(into={})


def test_tensors_that_share_memory_do_not_take_what_was_stored_with_different_contents(seat):
    save(seat, {"a": torch.ones(4), "b": torch.arange(4.0)})
    memory = torch.zeros(6)
    with ShardReader.open(seat / "slot-0") as reader:
        reader.state(into={"a": torch.zeros(4), "b": torch.zeros(4)})
        with pytest.raises(StateMismatchError, match="a and b share memory"):
            reader.state(into={"a": memory[:4], "b": memory[2:]})
    assert not memory.any()


def test_views_of_one_buffer_are_loaded_when_they_agree(seat):
    flat = torch.arange(6.0)
    state = {"flat": flat, "head": flat[:4].view(2, 2), "tail": flat[4:]}
    save(seat, state)
    memory = torch.zeros(6)
    into = {"flat": memory, "head": memory[:4].view(2, 2), "tail": memory[4:]}
    with ShardReader.open(seat / "slot-0") as reader:
        reader.state(into=into)
    assert torch.equal(memory, flat)


def test_a_negative_view_is_loaded_into(seat):
    save(seat, {"w": torch.arange(4.0)})
    target = torch.zeros(4)._neg_view()
    with ShardReader.open(seat / "slot-0") as reader:
        reader.state(into={"w": target})
    assert torch.equal(target, torch.arange(4.0))
