from __future__ import annotations

import json

import pytest

from mlflashpoint.timings.prefix import Line, strip
from tests.timings.helpers import found, iteration, save_line, scan

_ROW = "    save-checkpoint ................................: (10.00, 12.50)"
_LINES = (
    iteration(5).rstrip("\n"),
    "INFO:megatron.core.timers:(min, max) time across ranks (ms):",
    _ROW,
    save_line(0, 5, 11.0).rstrip("\n"),
)

PREFIXES = {
    "srun --label": "3: ",
    "srun --label, padded": "   3: ",
    "torchrun --tee": "[default0]:",
    "torchrun role": "[trainer12]:",
    "torchrun under srun": "1: [default0]:",
    "Ray actor": "\x1b[36m(MegatronPolicyWorker pid=24563)\x1b[0m ",
    "Ray actor elsewhere": "(MegatronPolicyWorker[rank=3] pid=24563, ip=10.0.0.7) ",
    "SkyPilot": "(head, rank=0, pid=3521) ",
    "kubectl logs --timestamps": "2026-01-01T10:00:00.123456789Z ",
    "kubectl logs --timestamps, zone": "2026-01-01T10:00:00.123456789+02:00 ",
    "kubectl logs --prefix": "[pod/trainer-0/main] ",
    "kubectl logs --prefix --timestamps": "[pod/trainer-0/main] 2026-01-01T10:00:00Z ",
    "container runtime": "2026-01-01T10:00:00.123456789Z stdout F ",
    "docker compose": "trainer-0  | ",
    "pod, then torchrun": "[pod/trainer-0/main] [default3]:",
    "an unknown one": "host17> ",
}


@pytest.mark.parametrize("name", PREFIXES)
def test_timings_are_read_behind_the_prefix_of(name: str) -> None:
    log = "".join(f"{PREFIXES[name]}{line}\n" for line in _LINES)
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("flashpoint-save", 5, 11.0)]


@pytest.mark.parametrize("name", [name for name in PREFIXES if name != "an unknown one"])
def test_the_text_behind_a_prefix_keeps_its_indentation(name: str) -> None:
    assert strip((PREFIXES[name] + _ROW).encode()).text == _ROW


def test_the_writer_is_what_the_prefix_names_without_the_time() -> None:
    one = strip(b"[pod/trainer-0/main] 2026-01-01T10:00:00Z [default3]:x")
    other = strip(b"[pod/trainer-0/main] 2026-01-01T10:00:01Z [default3]:x")
    assert one == other == Line("pod/trainer-0/main/default3", "x", 0)


def test_the_lines_of_a_docker_log_file_are_unwrapped() -> None:
    log = "".join(
        json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-01-01T10:00:00Z"}) + "\n" for line in _LINES
    )
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("flashpoint-save", 5, 11.0)]


def test_colours_and_control_characters_are_taken_off() -> None:
    log = "".join(f"\x1b[1m\x1b[32m{line}\x1b[0m\x07\n" for line in _LINES)
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("flashpoint-save", 5, 11.0)]


def test_what_follows_a_progress_bar_is_read() -> None:
    bar = "\rEpoch 0:  12%|█▎        | 1/8 [00:00<00:00]"
    log = "".join(f"{bar}\r{line}\n" for line in _LINES[:3])
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5)]
    assert found(scan(f"{bar}{_LINES[1]}\n{_LINES[2]}\r\n{bar}{_LINES[3]}\n")) == [
        ("save-checkpoint", None, 12.5),
        ("flashpoint-save", 5, 11.0),
    ]


def test_the_count_of_lines_that_ray_left_out_is_read() -> None:
    line = strip(b"\x1b[36m(W pid=1)\x1b[0m hello\x1b[32m [repeated 11x across cluster] (Ray ...)\x1b[0m")
    assert line == Line("W pid=1", "hello", 11)


@pytest.mark.parametrize("key", ["log", "msg", "message", "text"])
def test_the_text_of_a_json_record_is_read(key: str) -> None:
    log = "".join(json.dumps({"level": "info", key: line, "rank": 3}) + "\n" for line in _LINES)
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("flashpoint-save", 5, 11.0)]


def test_all_lines_of_a_json_record_are_read() -> None:
    """A logger that writes JSON puts a whole block of timers into one record."""
    log = json.dumps({"ts": 1, "msg": "\n".join(_LINES)}) + "\n"
    assert found(scan(log)) == [("save-checkpoint", 5, 12.5), ("flashpoint-save", 5, 11.0)]


def test_a_list_of_ranks_in_json_records_is_read() -> None:
    lines = ("times across ranks (ms):", "  save-checkpoint:", "     rank  0: 10.00", "     rank  1: 30.00")
    log = "".join(json.dumps({"level": "info", "msg": line}) + "\n" for line in lines)
    assert found(scan(log)) == [("save-checkpoint", None, 30.0)]


def test_records_of_json_can_be_wrapped_prefixed_and_glued() -> None:
    records = [json.dumps({"msg": line, "x": {}}) for line in _LINES]
    expected = [("save-checkpoint", 5, 12.5), ("flashpoint-save", 5, 11.0)]
    assert found(scan("".join(json.dumps({"log": f"{record}\n"}) + "\n" for record in records))) == expected
    assert found(scan("".join(f"[pod/a/b] 3: {record}\n" for record in records))) == expected
    assert found(scan("".join(records))) == expected
    assert found(scan(" ".join(records))) == expected
    assert found(scan("".join(records[:3]) + _LINES[3])) == expected


def test_the_writer_of_a_json_record_is_what_the_prefixes_in_and_before_it_name() -> None:
    assert strip(b'[pod/a/b] {"log": "3: x\\n"}') == Line("pod/a/b/3", "x", 0)


@pytest.mark.parametrize("text", ['{"log": 3}', '{"log": "cut', "{}", '{"other": "x"}', "[1]", "{", '{"msg": ""}'])
def test_what_is_no_record_with_a_text_stays_what_it_is(text: str) -> None:
    assert strip(text.encode()) == Line("", text, 0)


def test_a_record_of_json_in_records_of_json_without_end_does_no_harm() -> None:
    text = "x"
    for _ in range(12):
        text = json.dumps({"msg": text})
    assert scan(text + "\n").torn == 0
