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
