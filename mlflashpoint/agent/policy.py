"""Whether a patch may go in: the settings of this environment, and the versions that are installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mlflashpoint.agent.patch import Patch
from mlflashpoint.agent.versions import in_range, installed_version
from mlflashpoint.errors import SettingError
from mlflashpoint.settings import BY_NAME, KNOBS, StoreConfig, job_id_from, unknown_settings


@dataclass(frozen=True)
class Refusal:
    """Why a patch stays out; ``expected`` when somebody asked for it."""

    reason: str
    expected: bool = False


def setting_errors(environ: Mapping[str, str]) -> list[SettingError]:
    """Every malformed or unknown setting, a job id that is missing or no plain name, and what contradicts another."""
    errors = unknown_settings(environ)
    for knob in KNOBS:
        try:
            knob.read(environ)
        except SettingError as error:
            errors.append(error)
    try:
        job_id_from(environ)
    except SettingError as error:
        errors.append(error)
    if not errors:
        # What each setting alone does not show: said now, and not by a fault at the job's first save.
        try:
            StoreConfig.from_env(environ)
        except SettingError as error:
            errors.append(error)
    return errors


def decide(patch: Patch, environ: Mapping[str, str] | None = None) -> tuple[str | None, Refusal | None]:
    """``(installed version, why the patch stays out or None)``."""
    env = os.environ if environ is None else environ
    version = installed_version(patch.versions[0], patch.module.partition(".")[0]) if patch.versions else None
    return version, _setting_refusal(patch, env) or _version_refusal(patch, version)


def _setting_refusal(patch: Patch, environ: Mapping[str, str]) -> Refusal | None:
    knob = BY_NAME[patch.setting]
    try:
        value = knob.read(environ)
    except SettingError as error:
        return Refusal(str(error))
    if not value or value == "off":
        return Refusal(f"{knob.variable} is {environ.get(knob.variable, knob.default)!s}", expected=True)
    errors = setting_errors(environ)
    return Refusal(str(errors[0])) if errors else None


def _version_refusal(patch: Patch, version: str | None) -> Refusal | None:
    if patch.versions is None:
        return None
    distribution, wanted = patch.versions
    if version is None:
        return Refusal(f"{distribution} is not installed, or its version can't be told")
    try:
        fits = in_range(version, wanted)
    except ValueError:
        fits = False
    return None if fits else Refusal(f"{distribution} {version} is outside the tested range {wanted}")


def strict(environ: Mapping[str, str] | None = None) -> bool:
    """The setting MLFLASHPOINT_STRICT; False when it is malformed."""
    try:
        return bool(BY_NAME["strict"].read(os.environ if environ is None else environ))
    except SettingError:
        return False
