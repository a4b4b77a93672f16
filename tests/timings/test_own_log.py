"""What the store logs of its saves is what the parser reads: neither side's form can change alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import memory_folder
from tests.timings.helpers import parsed


def test_the_stores_own_lines_give_each_saves_blocking_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlflashpoint")
    with memory_folder() as folder:
        config = StoreConfig(job_id="job", base_container=folder / "base", replicas=0)
        runtime = Runtime(config, rank=0, world_size=1, local_rank=0)
        blocking = []
        for step in (5, 10, 15):
            blocking.append(runtime.save({"w": torch.ones(1 << 16)}, step=step).blocking_s)
            assert runtime.flush()
        runtime.discard()
    lines = [f"{record.levelname} {record.getMessage()}\n" for record in caplog.records]
    found = parsed(tmp_path, "own", ["".join(lines)])
    saves = found.timers["flashpoint-save"]
    assert [sample.step for sample in saves] == [5, 10, 15]
    # The line has microseconds.
    assert [sample.seconds for sample in saves] == pytest.approx(blocking, abs=1e-6)
    assert [sample.step for sample in found.timers["flashpoint-commit"]] == [5, 10, 15]
    assert (found.failed, found.skipped) == ({}, {})
