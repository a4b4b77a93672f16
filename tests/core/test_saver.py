import dataclasses
import io
import weakref

import numpy as np
import pytest
import torch
import xxhash

from mlflashpoint.core import saver as saver_module
from mlflashpoint.core.arena import Arena, file_of
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.saver import Planned, ShardSaver
from mlflashpoint.core.state import register_leaf
from mlflashpoint.errors import StateTypeError
from tests.core.shard_helpers import FIELDS, bits, differences, save


def loaded(arena, slot=0):
    with ShardReader.open(arena.slots[slot].path) as reader:
        reader.verify()
        return reader.state()


def everything():
    weight = torch.nn.Parameter(torch.randn(40, 50))
    return {
        "weight": weight,
        "tied": weight,
        "turned": torch.randn(30, 20).t(),
        "strided": torch.randn(30, 20)[:, ::2],
        "large": torch.randn(700_000),
        "half": torch.randn(9).bfloat16(),
        "sparse": torch.eye(4).to_sparse(),
        "array": np.arange(5.0),
        "raw": bytearray(b"abc" * 2000),
        "steps": [1, 2, {"lr": 0.5}],
        "stream": io.BytesIO(b"content"),
    }


def test_what_changes_right_after_staging_never_reaches_the_store(seat):
    saver, state, again = ShardSaver(), everything(), everything()
    for name in ("weight", "turned", "strided", "large", "half"):
        again[name].data.copy_(state[name])
    again["tied"] = again["weight"]
    arena = Arena(seat)
    arena.reserve(1, saver.size_of(state))
    staged = saver.stage(arena.slots[0], state)
    with torch.no_grad():
        for name in ("weight", "turned", "strided", "large", "half"):
            state[name].fill_(7)
        state["sparse"]._values().fill_(7)
    state["array"][:] = 7
    state["raw"][:] = b"7" * 6000
    state["steps"][2]["lr"] = 7
    state["steps"].clear()
    state["stream"].write(b"7")
    del state["weight"]
    saver.commit(staged, step=1, **FIELDS)
    result = loaded(arena)
    assert result.pop("stream").getvalue() == b"content" and again.pop("stream")
    assert np.array_equal(result.pop("array"), again.pop("array"))
    assert differences(result, again) == []


def test_staging_holds_on_to_nothing_of_the_state(seat):
    saver = ShardSaver()
    arena = Arena(seat)
    arena.reserve(1, 1 << 20)
    freed = []
    tensor = torch.ones(1000)
    weakref.finalize(tensor, freed.append, True)
    staged = saver.stage(arena.slots[0], {"w": tensor})
    del tensor
    assert freed == [True]
    saver.commit(staged, step=1, **FIELDS)


def test_three_saves_with_the_optimizer_offloaded_between_them_are_the_live_states(seat):
    saver, arena = ShardSaver(), None
    moments = torch.randn(1000)
    state = {"moments": moments, "w": torch.ones(10)}
    digests = []
    for step in range(3):
        moments.add_(1)
        arena, _ = save(seat, state, step=step, slot=step % 2, saver=saver, arena=arena)
        with ShardReader.open(arena.slots[step % 2].path) as reader:
            entry = reader.entry("moments")
            assert entry.digest == xxhash.xxh3_128_hexdigest(bits(moments))
        digests.append(entry.digest)
        # Offloading swaps the memory under a tensor that stays the same object.
        moments.data = moments.data.clone()
    assert len(set(digests)) == 3


def test_a_state_of_another_form_in_the_same_slot_is_stored_as_it_is(seat):
    saver, arena = ShardSaver(), None
    states = [
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)},
        {"a": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2)},
        {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2)},
        {"a": torch.arange(6).reshape(3, 2), "b": torch.ones(2)},
        {"b": torch.ones(2), "a": torch.arange(6).reshape(3, 2)},
        {"a": [torch.arange(6)], "b": None},
        {},
        7,
    ]
    for step, state in enumerate(states + states[::-1]):
        arena, record = save(seat, state, step=step, saver=saver, arena=arena)
        assert record.step == step
        assert differences(loaded(arena), state) == []


def test_a_second_save_of_the_same_form_plans_nothing_anew(seat):
    saver = ShardSaver()
    arena, _ = save(seat, {"w": torch.ones(5), "step": 1}, saver=saver)
    layout, views = saver.plan({"w": torch.zeros(5), "step": 2}).layout, arena.slots[0]._placed
    save(seat, {"w": torch.zeros(5), "step": 2}, saver=saver, arena=arena)
    assert saver.plan({"w": torch.zeros(5), "step": 3}).layout is layout
    assert arena.slots[0]._placed is views


def test_a_state_that_can_not_be_stored_leaves_the_slot_as_it_was(seat):
    saver = ShardSaver()
    arena, record = save(seat, {"w": torch.arange(4.0)}, saver=saver)
    for attempt in ({"state": {"w": object()}}, {"state": {"w": torch.ones(4)}, "attributes": {"t": torch.ones(1)}}):
        with pytest.raises(StateTypeError):
            saver.stage(arena.slots[0], **attempt)
        with ShardReader.open(arena.slots[0].path) as reader:
            assert reader.record == record and torch.equal(reader.state()["w"], torch.arange(4.0))


def test_a_slot_is_given_up_before_its_first_byte_changes(seat):
    saver = ShardSaver()
    arena, _ = save(seat, {"w": torch.arange(4.0)}, saver=saver)
    seen = []

    class Watching(ShardSaver):
        def _copy(self, slot, planned):
            seen.append((file_of(slot.path, "commit").exists(), slot.record))

    Watching().stage(arena.slots[0], {"w": torch.zeros(4)})
    assert seen == [(False, None)]


def test_attributes_travel_with_the_shard(seat):
    attributes = {"loop": {"epoch": 3, "loss": float("nan")}, "order": (1, b"x"), "none": None}
    arena, _ = save(seat, {"w": torch.ones(1)}, **attributes)
    with ShardReader.open(arena.slots[0].path) as reader:
        assert differences(reader.attributes, attributes) == []


def test_attributes_may_come_after_staging(seat):
    saver = ShardSaver()
    arena = Arena(seat)
    arena.reserve(1, 100)
    staged = saver.attach(saver.stage(arena.slots[0], [1], attributes={"a": 1}), {"b": 2})
    saver.commit(staged, step=1, **FIELDS)
    with ShardReader.open(arena.slots[0].path) as reader:
        assert reader.attributes == {"b": 2}


def test_the_record_says_what_commit_was_told(seat):
    saver = ShardSaver()
    arena = Arena(seat)
    arena.reserve(1, 100)
    told = {"job_id": "j", "group": "g", "incarnation": 4, "step": 9, "rank": 2, "world_size": 5, "topology": "tp2"}
    told |= {"resumed_from": 3, "run": "abc"}
    record = saver.commit(saver.stage(arena.slots[0], [torch.ones(3)]), **told)
    assert {name: getattr(record, name) for name in told} == told
    assert arena.slots[0].record == record
    with ShardReader.open(arena.slots[0].path) as reader:
        assert reader.record == record and record.data_bytes == 12


def test_nothing_but_the_slots_files_is_left_and_all_are_private(seat):
    arena, _ = save(seat, everything())
    names = {path.name: path.stat().st_mode & 0o777 for path in seat.iterdir()}
    assert names == dict.fromkeys(["slot-0.data", "slot-0.index", "slot-0.commit", "slot-1.data"], 0o600)
    arena.close()


def test_a_state_that_changes_under_the_walk_is_a_named_error():
    class Meddling:
        pass

    state = {"a": 1, "m": Meddling(), "z": 2}
    register_leaf("test.Meddling", Meddling, lambda m: state.update(new=1), lambda s: None)
    with pytest.raises(StateTypeError, match=r"state\.z: .*changed size"):
        ShardSaver().plan(state)


@pytest.mark.parametrize("offset", [0, 5])
def test_a_tensor_whose_storage_was_taken_away_is_refused_and_not_read(offset):
    saver, tensor = ShardSaver(), torch.ones(100)[offset:]
    saver.plan({"w": tensor})
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateTypeError, match=r"state\.w: .*storage"):
        saver.plan({"w": tensor})


def test_a_key_that_is_no_plain_value_is_refused_by_its_place():
    with pytest.raises(StateTypeError, match=r"state\.a\[<.*object.*>\]: the key"):
        ShardSaver().plan({"a": {"ok": 1, object(): torch.ones(1)}})


def test_saving_works_whatever_mode_torch_is_in(seat):
    saver, state = ShardSaver(), {"w": torch.arange(9.0), "none": torch.empty(0), "raw": b"x" * 5000, "b": bytearray()}
    with torch.inference_mode():
        arena, _ = save(seat, state, saver=saver)
    save(seat, state, saver=saver, arena=arena)
    with torch.device("meta"):
        save(seat, state, saver=saver, arena=arena)
        result = loaded(arena)
    assert differences(result, state) == []
    with torch.inference_mode():
        result = loaded(arena)
    assert not result["w"].is_inference() and differences(result, state) == []
    state["w"].requires_grad_()
    save(seat, state, saver=saver, arena=arena)
    assert loaded(arena)["w"].requires_grad


def test_an_index_beyond_the_limit_is_refused_when_saving(seat, monkeypatch):
    monkeypatch.setattr(saver_module, "MAX_INDEX_BYTES", 100)
    with pytest.raises(StateTypeError, match="index"):
        save(seat, list(range(100)))
    assert not file_of(seat / "slot-0", "commit").exists()


class Recorder:
    """Stands in for a device that this machine does not have: copies when it is waited for."""

    def __init__(self):
        self.log, self.jobs = [], []

    def pin(self, region):
        self.log.append("pin")
        return True

    def unpin(self, region):
        self.log.append("unpin")

    def start(self, targets, sources, device):
        self.log.append(f"start {len(targets)} {device}")
        self.jobs += zip(targets, sources, strict=True)

    def wait(self):
        self.log.append("wait")
        for target, source in self.jobs:
            target.copy_(source)
        self.jobs = []


def test_copies_from_devices_are_begun_first_and_waited_for(seat, monkeypatch):
    recorder = Recorder()
    saver = ShardSaver(accelerators={"cuda": recorder})
    state = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5), "d": torch.ones(6)}

    def planned():
        plan = saver.plan(state)
        devices = [torch.device(name) for name in ("cuda:0", "cpu", "cuda:1", "cuda:0")]
        return Planned(dataclasses.replace(plan.flat, devices=devices), plan.layout)

    arena = Arena(seat)
    arena.reserve(1, 1000)
    for step in range(2):
        staged = saver.stage(arena.slots[0], planned())
        saver.commit(staged, step=step, **FIELDS)
        assert differences(loaded(arena), state) == []
    assert recorder.log == ["pin", *["start 2 cuda:0", "start 1 cuda:1", "wait"] * 2]
    arena.reserve(1, 3 << 20)
    saver.stage(arena.slots[0], planned())
    assert recorder.log[-5:-3] == ["unpin", "pin"]
    arena.close()
    assert recorder.log[-1] == "unpin"


def test_copies_that_were_begun_are_waited_for_when_another_fails(seat):
    class Failing(Recorder):
        def start(self, targets, sources, device):
            super().start(targets, sources, device)
            raise RuntimeError("device lost")

    recorder = Failing()
    saver = ShardSaver(accelerators={"cuda": recorder})
    plan = saver.plan([torch.ones(3)])
    arena = Arena(seat)
    arena.reserve(1, 1000)
    with pytest.raises(RuntimeError, match="device lost"):
        saver.stage(
            arena.slots[0], Planned(dataclasses.replace(plan.flat, devices=[torch.device("cuda")]), plan.layout)
        )
    assert recorder.log[-1] == "wait" and arena.slots[0].record is None


def test_a_large_tensor_is_digested_in_pieces_with_a_moment_for_others_between_them(seat, monkeypatch):
    monkeypatch.setattr(saver_module, "_PIECE_BYTES", 1000)
    saver, content = ShardSaver(), {"w": torch.randn(1100), "exact": torch.randn(500), "small": torch.ones(3)}
    arena = Arena(seat)
    arena.reserve(1, saver.size_of(content))
    staged, moments = saver.stage(arena.slots[0], content), []
    saver.commit(staged, step=1, between=lambda: moments.append(1), **FIELDS)
    assert len(moments) == 5 + 2 + 1
    with ShardReader.open(arena.slots[0].path) as reader:
        digests = {entry.name: entry.digest for entry in reader.index.tensors}
    for name, tensor in content.items():
        assert digests[name] == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
