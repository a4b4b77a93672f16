"""Single parts of the adapter, in a process with the real Bridge. Every version."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapter.megatron_bridge.conftest import NEWEST, Fleets, Memory
from tests.adapter.megatron_bridge.fleet import VERSIONS

pytestmark = pytest.mark.parametrize("version", VERSIONS[::-1])

UNSET = ["non_persistent_ckpt_type: null", "non_persistent_save_interval: null"]


def probe(fleets: Fleets, version: str, name: str, environ: dict[str, str] | None = None) -> Any:
    run = fleets("on", version).run({}, environ, probe=f"probes:{name}")
    return run.events(0, "probe")[0]["result"]


@pytest.fixture
def environ(memory: Memory) -> dict[str, str]:
    return memory.environ(every=20)


def test_the_recipes_own_interval_is_the_cadence_and_the_setting_only_where_it_has_none(
    fleets: Fleets, version: str, environ: dict[str, str]
) -> None:
    found = probe(fleets, version, "cadences", environ)
    chosen = {name: (made["type"], made["interval"]) for name, made in found.items()}
    assert chosen["says nothing"] == ("local", 20)
    assert chosen["local with an interval"] == chosen["an interval and no type"] == ("local", 7)
    assert chosen["local without an interval"] == ("local", 20)
    assert chosen["global"] == ("global", 7)


def test_recipes_that_memory_can_not_serve_are_left_as_they_are(
    fleets: Fleets, version: str, environ: dict[str, str]
) -> None:
    found = probe(fleets, version, "cadences", environ)
    refused = [name for name in ("HF export", "fsdp_dtensor", "another manager") if name in found]
    # The export to HF came with 0.6.
    assert len(refused) == (3 if version == NEWEST else 2)
    assert {(found[name]["type"], found[name]["interval"]) for name in refused} == {(None, None)}


def test_the_config_that_bridge_keeps_with_a_checkpoint_is_what_the_recipe_said(
    fleets: Fleets, version: str, environ: dict[str, str]
) -> None:
    found = probe(fleets, version, "cadences", environ)
    assert [line for line in found["says nothing"]["yaml"] if line in UNSET] == UNSET
    assert found["says nothing"]["folder"].startswith("/dev/shm/")
    assert "non_persistent_local_ckpt_dir: /scratch" in found["local without an interval"]["yaml"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": None}, {"type": None, "interval": None}),
        ({"every": 20}, {"type": "local", "interval": 20}),
        ({"every": 20, "bridge_mode": "observe"}, {"type": None, "interval": None}),
        ({"every": None, "bridge_mode": "replace"}, {"type": "local", "interval": None}),
        ({"every": "often"}, {"type": None, "interval": None}),
        ({"every": 20, "job_id": "a/b"}, {"type": None, "interval": None}),
    ],
    ids=lambda value: "-".join(f"{key}.{item}" for key, item in value.items()).replace("/", "_"),
)
def test_bridges_validation_sets_the_cadence_as_the_settings_say(
    fleets: Fleets, memory: Memory, version: str, settings: dict, expected: dict
) -> None:
    assert probe(fleets, version, "validated", memory.environ(**settings)) == expected


def test_a_shard_comes_back_as_it_was_with_its_side_files(fleets: Fleets, version: str) -> None:
    assert probe(fleets, version, "there_and_back") == {
        "tensor": True,
        "grad": False,
        "fields": True,
        "hollow": True,
        "extra": "fp8",
        "optimizer": {"lr": 0.1},
        "numpy": True,
        "enum": True,
        "common": [3, 3],
        "file": True,
    }


def test_parameters_that_do_not_hold_what_was_loaded_are_told_apart(fleets: Fleets, version: str) -> None:
    found = probe(fleets, version, "unlike_parameters")
    assert found == {"same": [], "changed": ["model.weight"], "missing": ["model.weight", "model.bias"]}


def test_a_job_without_nvrx_is_refused_with_the_reason(fleets: Fleets, version: str) -> None:
    found = probe(fleets, version, "without_nvrx")
    assert found["with"] is None
    assert "nvidia_resiliency_ext is not installed" in found["without"]
