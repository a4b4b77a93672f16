"""The runs of an A/B comparison: what differs between them, in which order, in which environment."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.errors import SettingError, TimingsError
from mlflashpoint.run import prepare
from mlflashpoint.settings import BY_VARIABLE, PREFIX, job_id_from, unknown_settings
from mlflashpoint.timings.arguments import label

_JOB_ID = "MLFLASHPOINT_JOB_ID"
_BASE = "MLFLASHPOINT_BASE_CONTAINER"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: a label, and the environment variables that only it has."""

    label: str
    settings: Mapping[str, str]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Arm:
        """From ``LABEL NAME=VALUE ...``.

        Raises:
            TimingsError: a word is no assignment, or names a variable twice.
            SettingError: an ``MLFLASHPOINT_`` variable is unknown or malformed.
        """
        name, *assignments = words
        settings: dict[str, str] = {}
        for word in assignments:
            variable, equals, value = word.partition("=")
            if not equals or not _NAME.fullmatch(variable):
                raise TimingsError(f"arm {name}: {word!r} is no NAME=VALUE", remedy="put '--' before the command")
            if variable in settings:
                raise TimingsError(f"arm {name}: {variable} is set twice")
            settings[variable] = value
        for error in unknown_settings(settings):
            raise error
        for variable, value in settings.items():
            if variable.startswith(PREFIX) and "{" not in value:
                BY_VARIABLE[variable].parse(variable, value)
        return cls(label(name), settings)


@dataclass(frozen=True)
class Run:
    """One start of the launch command."""

    arm: Arm
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.arm.label}-r{self.repeat}"

    def filled(self, text: str) -> str:
        """``text`` with ``{run}``, ``{arm}`` and ``{repeat}`` replaced; other braces are kept."""
        return text.replace("{run}", self.name).replace("{arm}", self.arm.label).replace("{repeat}", str(self.repeat))


def plan(arms: Sequence[Arm], repeats: int) -> list[Run]:
    """Every arm ``repeats`` times, in turn; the order is reversed each time, so that no arm is always the warm one."""
    runs = []
    for repeat in range(1, repeats + 1):
        runs += [Run(arm, repeat) for arm in (arms if repeat % 2 else reversed(arms))]
    return runs


def token() -> str:
    """A name for this comparison that no earlier one has had."""
    return time.strftime("ab%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def environment(run: Run, caller: Mapping[str, str], comparison: str) -> dict[str, str]:
    """The environment of a run: the caller's, the agent switched on, a memory store of its own, the arm's settings.

    Each run gets a job id and a base container that no other run has, so that none finds what another one has left in
    memory. What the arm itself sets is kept as it is.

    Args:
        run: the run.
        caller: environment to start from.
        comparison: what ``token`` gave.

    Raises:
        SettingError: a value of the arm is malformed once its places are filled.
    """
    environ = dict(caller)
    # Ray would leave out all but one of the lines that differ in numbers alone, as save records do
    environ.setdefault("RAY_DEDUP_LOGS", "0")
    prepare(environ)
    try:
        job = job_id_from(caller)[0][:100]
    except SettingError:
        job = ""
    environ[_JOB_ID] = "-".join(part for part in (job, comparison, run.name) if part)
    if base := caller.get(_BASE):
        environ[_BASE] = str(Path(base) / f"{comparison}-{run.name}")
    for name, text in run.arm.settings.items():
        environ[name] = value = run.filled(text)
        if name.startswith(PREFIX):
            BY_VARIABLE[name].parse(name, value)
    return environ
