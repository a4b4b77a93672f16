"""What the doctor looks at: facts about this environment or about a running process, gathered and not judged.

No framework is imported: versions come from the metadata of what is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflashpoint.agent import bootstrap, policy, start, status
from mlflashpoint.agent.frameworks import FRAMEWORKS
from mlflashpoint.agent.install import FILE_NAME
from mlflashpoint.core.container import check_container
from mlflashpoint.core.deadline import bounded
from mlflashpoint.core.drainplace import SETTING, foresee_place
from mlflashpoint.core.filesystem import existing_folder, filesystem_kind
from mlflashpoint.errors import FlashpointError, SettingError
from mlflashpoint.replication import transports
from mlflashpoint.settings import KNOBS, StoreConfig, job_id_from, unknown_settings

Facts = dict[str, Any]

#: a network file system may hang
_LOOK_S = 10.0


def start_up(environ: Mapping[str, str]) -> Facts:
    """How Python would come to start the agent: the switch, the sitecustomize chain, an installed ``.pth`` file."""
    chain = bootstrap.chain(bootstrap.entries(environ))
    installed = [str(path) for entry in sys.path if (path := Path(entry) / FILE_NAME).is_file()]
    ours = [place for place, file in enumerate(chain) if file.ours]
    supported = bootstrap.SUPPORTED[0] <= sys.version_info[:2] < bootstrap.SUPPORTED[1]
    value = environ.get("MLFLASHPOINT_ENABLED")
    on = False
    if not bootstrap.is_on(value):
        reason = "MLFLASHPOINT_ENABLED is not set" if value is None else f"MLFLASHPOINT_ENABLED is {value!r}"
    elif not supported:
        reason = f"Python {sys.version_info[0]}.{sys.version_info[1]} is not supported"
    elif installed:
        on, reason = True, f"{installed[0]} starts it"
    elif not ours:
        reason = f"no start-up file on the path: put {bootstrap.folder()} on PYTHONPATH, or use 'mlflashpoint install'"
    elif ours[0] > 0:
        reason = f"{chain[0].path} stands before ours, and Python runs only the first: put {bootstrap.folder()} first"
    elif sys.flags.no_site:
        reason = "Python runs with -S"
    else:
        on, reason = True, f"{chain[0].path} starts it"
    if on and (errors := policy.setting_errors(environ)):
        on, reason = False, f"it starts and patches nothing: {errors[0]}"
    return {
        "wanted": bootstrap.is_on(value),
        "on": on,
        "reason": reason,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "folder": str(bootstrap.folder()),
        "installed": installed,
        "sitecustomize": [asdict(file) for file in chain],
        "started_here": start.has_started(),
    }


def settings(environ: Mapping[str, str]) -> list[Facts]:
    """Every setting with its value, where it comes from, and what is wrong with it; unknown ones too."""
    rows: list[Facts] = []
    for knob in KNOBS:
        given = knob.variable in environ
        row: Facts = {"variable": knob.variable, "meaning": knob.meaning, "error": None, "missing": False}
        try:
            row["value"] = _plain(knob.read(environ))
            row["source"] = "environment" if given else "default"
            if knob.variable == transports.SETTING and (missing := transports.missing_engine(row["value"])):
                row["error"] = str(missing)
        except SettingError as error:
            row.update(value=environ[knob.variable], source="environment", error=str(error))
        rows.append(row)
    for unknown in unknown_settings(environ):
        row = {"variable": unknown.setting, "meaning": "", "value": unknown.value, "source": "environment"}
        rows.append({**row, "error": str(unknown), "missing": False})
    row = next(row for row in rows if row["variable"] == "MLFLASHPOINT_JOB_ID")
    try:
        row["value"], row["source"] = job_id_from(environ)
        if row["source"] == "MLFLASHPOINT_JOB_ID":
            row["source"] = "environment"
    except SettingError as error:
        row["error"], row["missing"] = str(error), error.value is None
    return rows


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def container(environ: Mapping[str, str]) -> Facts:
    """The base container: its path, and kind, size and free bytes of the file system that it lies or would lie on."""
    facts: Facts = {"path": None, "kind": None, "total": None, "free": None, "error": None}
    try:
        config = StoreConfig.from_env(environ)
        facts["path"] = str(config.base_container)
        existing = existing_folder(config.base_container)
        facts["kind"] = filesystem_kind(existing)
        usage = os.statvfs(existing)
        facts["total"], facts["free"] = usage.f_frsize * usage.f_blocks, usage.f_frsize * usage.f_bavail
        check_container(config)
    except (FlashpointError, OSError) as error:
        facts["error"] = str(error)
    return facts


def drain_dir(environ: Mapping[str, str]) -> Facts:
    """The drain directory, and why it could not be drained to."""
    facts: Facts = {"path": None, "error": None}
    # What is wrong with the settings is told of each of them.
    with contextlib.suppress(SettingError):
        config = StoreConfig.from_env(environ)
        if config.drain_dir is not None:
            root, base = config.drain_dir, config.base_container
            facts["path"] = str(root)
            try:
                bounded(lambda: foresee_place(root, base), _LOOK_S, "a look at the drain directory")
            except FlashpointError as error:
                error.setting = SETTING
                facts["error"] = str(error)
    return facts


def frameworks(environ: Mapping[str, str]) -> list[Facts]:
    """Each framework with its patches: the version found, and whether the patch will be applied, or why not."""
    rows = []
    for framework, _, table in FRAMEWORKS:
        row: Facts = {"framework": framework, "error": None, "patches": []}
        try:
            patches = importlib.import_module(table).PATCHES
        except Exception as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == table
            row["error"] = "not part of this build" if absent else f"{type(error).__name__}: {error}"
            patches = ()
        for patch in patches:
            version, refusal = policy.decide(patch, environ)
            row["patches"].append(
                {
                    "name": patch.name,
                    "target": f"{patch.module}:{patch.target}",
                    "distribution": patch.versions[0] if patch.versions else None,
                    "range": patch.versions[1] if patch.versions else None,
                    "version": version,
                    "will_apply": refusal is None,
                    "reason": "" if refusal is None else refusal.reason,
                    "expected": refusal is None or refusal.expected,
                }
            )
        rows.append(row)
    return rows


def environment_of(pid: int) -> dict[str, str]:
    """The environment that process ``pid`` was started with.

    Raises:
        FlashpointError: there is no such process, or it is another user's.
    """
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        raise FlashpointError(
            f"can't read the environment of process {pid}: {error.strerror}",
            remedy="give the id of a running process of yours, on this node and in this container",
        ) from None
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def process(pid: int) -> Facts:
    """What a running process reports of its patches."""
    written = status.read(pid)
    facts: Facts = {"pid": pid, "patches": [], "reason": ""}
    if written is None:
        facts["reason"] = "it has not imported a framework that the agent watches for, or the agent is not on in it"
    else:
        facts["patches"] = written["patches"]
    return facts
