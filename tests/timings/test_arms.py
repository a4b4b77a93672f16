from __future__ import annotations

import pytest

from mlflashpoint.agent.bootstrap import folder
from mlflashpoint.errors import FlashpointError, SettingError, TimingsError
from mlflashpoint.timings.arms import Arm, Run, environment, plan, token

_BASE, _JOB = "MLFLASHPOINT_BASE_CONTAINER", "MLFLASHPOINT_JOB_ID"


def _environments(caller: dict[str, str], *words: str) -> list[dict[str, str]]:
    runs = plan([Arm("baseline", {}), Arm.parse(["flashpoint", *words])], 2)
    return [environment(run, caller, "ab1") for run in runs]


def test_every_second_round_has_the_reverse_order() -> None:
    runs = plan([Arm("a", {}), Arm("b", {}), Arm("c", {})], 3)
    assert [run.name for run in runs] == ["a-r1", "b-r1", "c-r1", "c-r2", "b-r2", "a-r2", "a-r3", "b-r3", "c-r3"]


def test_a_run_inherits_the_callers_environment_and_has_the_arms_own() -> None:
    one, other, *_ = _environments({"PATH": "/bin", "X": "1"}, "X=2", "MLFLASHPOINT_SAVE_EVERY_N_STEPS=5")
    assert (one["PATH"], one["X"], one.get("MLFLASHPOINT_SAVE_EVERY_N_STEPS")) == ("/bin", "1", None)
    assert (other["PATH"], other["X"], other["MLFLASHPOINT_SAVE_EVERY_N_STEPS"]) == ("/bin", "2", "5")


def test_the_agent_is_on_unless_somebody_says_otherwise() -> None:
    for environ in _environments({}):
        assert environ["MLFLASHPOINT_ENABLED"] == "1"
        assert environ["PYTHONPATH"].split(":")[0] == str(folder())
    one, other, *_ = _environments({}, "MLFLASHPOINT_ENABLED=0")
    assert (one["MLFLASHPOINT_ENABLED"], other["MLFLASHPOINT_ENABLED"]) == ("1", "0")


@pytest.mark.parametrize("caller", [{}, {"SLURM_JOB_ID": "77"}, {_JOB: "mine", _BASE: "/dev/shm/mine"}])
def test_no_two_runs_share_what_is_left_in_memory(caller: dict[str, str]) -> None:
    environs = _environments(caller)
    assert len({environ[_JOB] for environ in environs}) == 4
    if _BASE in caller:
        assert {environ[_BASE].rpartition("/")[0] for environ in environs} == {"/dev/shm/mine"}
        assert len({environ[_BASE] for environ in environs}) == 4
    else:
        assert all(_BASE not in environ for environ in environs)


def test_the_callers_job_can_be_recognised_in_the_runs() -> None:
    assert _environments({"SLURM_JOB_ID": "77"})[0][_JOB] == "77-ab1-baseline-r1"


def test_what_the_arm_sets_is_kept() -> None:
    _, other, *_ = _environments({_JOB: "mine"}, f"{_JOB}=fixed", f"{_BASE}=/dev/shm/fixed")
    assert (other[_JOB], other[_BASE]) == ("fixed", "/dev/shm/fixed")


def test_two_comparisons_have_different_names() -> None:
    assert token() != token()


def test_ray_is_told_to_keep_every_line() -> None:
    assert _environments({})[0]["RAY_DEDUP_LOGS"] == "0"
    assert _environments({"RAY_DEDUP_LOGS": "1"})[0]["RAY_DEDUP_LOGS"] == "1"


def test_places_for_the_run_are_filled_and_other_braces_kept() -> None:
    run = Run(Arm("flashpoint", {}), 2)
    assert (
        run.filled("save=/ckpt/{run} {arm} {repeat} {x} ${HOME}") == "save=/ckpt/flashpoint-r2 flashpoint 2 {x} ${HOME}"
    )
    assert _environments({}, "SAVE=/ckpt/{run}")[1]["SAVE"] == "/ckpt/flashpoint-r1"


@pytest.mark.parametrize(
    ("words", "error", "reason"),
    [
        (["a", "X"], TimingsError, "'X' is no NAME=VALUE"),
        (["a", "1X=2"], TimingsError, "is no NAME=VALUE"),
        (["a", "X=1", "X=2"], TimingsError, "X is set twice"),
        (["a", "MLFLASHPOINT_BRIDGE_MOD=observe"], SettingError, "did you mean MLFLASHPOINT_BRIDGE_MODE"),
        (["a", "MLFLASHPOINT_BRIDGE_MODE=observed"], SettingError, "not a known choice"),
        (["a", "MLFLASHPOINT_SAVE_EVERY_N_STEPS=0"], SettingError, "out of range"),
    ],
)
def test_an_arm_that_can_not_work_is_refused_before_anything_runs(
    words: list[str], error: type[FlashpointError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        Arm.parse(words)
