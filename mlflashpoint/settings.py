"""Every setting: its environment variable, keyword, default, meaning and check, in one table.

A setting has one name everywhere: ``MLFLASHPOINT_KEEP_VERSIONS`` in the environment is the keyword
``keep_versions`` in Python and the row ``MLFLASHPOINT_KEEP_VERSIONS`` in the docs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.errors import SettingError

PREFIX = "MLFLASHPOINT_"

#: where a job id is taken from when MLFLASHPOINT_JOB_ID is unset, first hit wins
JOB_ID_SOURCES = (
    "MLFLASHPOINT_JOB_ID",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "RAY_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOB_COMPLETION_ID",
)

#: what replicas can travel by, see replication/transports.py
TRANSPORTS = ("gloo", "mooncake", "mooncake-rdma")


def _text(name: str, value: str) -> str:
    return value


def _flag(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise SettingError("not a switch", setting=name, value=value, remedy="use 1 or 0")


def _integer(minimum: int, maximum: int | None = None) -> Callable[[str, str], int]:
    def parse(name: str, value: str) -> int:
        bounds = f"a whole number from {minimum}" + ("" if maximum is None else f" to {maximum}")
        try:
            number = int(value.strip())
        except ValueError:
            raise SettingError("not a whole number", setting=name, value=value, remedy=f"use {bounds}") from None
        if number < minimum or (maximum is not None and number > maximum):
            raise SettingError("out of range", setting=name, value=value, remedy=f"use {bounds}")
        return number

    return parse


def _seconds(name: str, value: str) -> float:
    try:
        number = float(value.strip())
    except ValueError:
        number = float("nan")
    if not 0 < number < 1e9:
        raise SettingError("not a number of seconds", setting=name, value=value, remedy="use a number above 0")
    return number


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, value: str) -> str:
        lowered = value.strip().lower()
        if lowered not in allowed:
            raise SettingError("not a known choice", setting=name, value=value, remedy=f"use {', '.join(allowed)}")
        return lowered

    return parse


def _log_level(name: str, value: str) -> str:
    upper = value.strip().upper()
    allowed = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if upper not in allowed:
        raise SettingError("not a log level", setting=name, value=value, remedy=f"use {', '.join(allowed)}")
    return upper


def _directory(name: str, value: str) -> Path:
    if not value.strip() or not os.path.isabs(value):
        raise SettingError("not an absolute path", setting=name, value=value, remedy="give a path that begins with /")
    return Path(os.path.normpath(value))


def check_name(what: str, value: str, *, setting: str | None = None) -> None:
    """Raises SettingError unless ``value`` can be one path segment: no separator or control character in it."""
    plain = value.isprintable() and not set(value) & set("/\\") and value == value.strip()
    if not plain or not 0 < len(value) <= 200 or value[0] == "." or value[-1] == ".":
        raise SettingError(
            f"{what} is a plain name" + ("" if setting else f", not {value!r}"),
            setting=setting,
            value=value if setting else None,
            remedy="use up to 200 letters, digits, - and _",
        )


@dataclass(frozen=True)
class Knob:
    """One setting.

    Attributes:
        name: keyword, in lower case; the environment variable is ``MLFLASHPOINT_`` + upper case.
        default: value when the variable is unset.
        parse: ``(variable, text) -> value``; raises SettingError.
        meaning: one line for the docs and the doctor.
    """

    name: str
    default: Any
    parse: Callable[[str, str], Any]
    meaning: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in ``environ``, or the default; raises SettingError for a malformed one."""
        text = environ.get(self.variable)
        return self.default if text is None else self.parse(self.variable, text)


KNOBS: tuple[Knob, ...] = (
    Knob("enabled", False, _flag, "the master switch"),
    Knob("base_container", None, _directory, "where this job's versions live on each node; tmpfs"),
    Knob(
        "allow_non_tmpfs", False, _flag, "accept a base container that is not on tmpfs (slower, not node-local memory)"
    ),
    Knob("job_id", None, _text, "sticky name of the job across its restarts"),
    Knob("save_every_n_steps", None, _integer(1), "memory cadence where the recipe has none"),
    Knob("async", True, _flag, "finish a save in the background after staging"),
    Knob("replicas", 1, _integer(0), "copies on other failure domains; 0 turns replication off"),
    Knob("failure_domain", None, _text, "label of this node's failure domain; by default each node is one"),
    Knob("transport", "gloo", _choice(*TRANSPORTS), "what replicas travel by; mooncake needs the extra of that name"),
    Knob("keep_versions", 2, _integer(1, 3), "complete versions kept between saves (a rank has 2 slots or more)"),
    Knob("bridge_enabled", True, _flag, "patch Megatron Bridge"),
    Knob("megatron_lm_enabled", True, _flag, "patch Megatron-LM's training loop"),
    Knob("lightning_enabled", True, _flag, "patch Lightning"),
    Knob("nemo_enabled", True, _flag, "patch NeMo 2.0"),
    Knob("nemo_rl_enabled", True, _flag, "patch NeMo RL"),
    Knob("bridge_mode", "non_persistent", _choice("non_persistent", "replace", "observe"), "what Bridge saves become"),
    Knob("bridge_durable_every_n_saves", 10, _integer(1), "in replace mode every Nth durable save stays durable"),
    Knob("nemo_rl_mode", "augment", _choice("augment", "replace"), "what NeMo RL saves become"),
    Knob("nemo_rl_durable_every_n_saves", 10, _integer(1), "in replace mode every Nth durable save stays durable"),
    Knob(
        "dcp_mode",
        "off",
        _choice("augment", "replace", "off"),
        "what plain torch.distributed.checkpoint saves become",
    ),
    Knob("dcp_durable_every_n_saves", 10, _integer(1), "in replace mode every Nth durable save stays durable"),
    Knob("skip_durable_steps", True, _flag, "skip the memory save of a step that is saved durably (Lightning, NeMo)"),
    Knob("keep_on_success", False, _flag, "keep the memory versions when training ends well (Lightning, NeMo)"),
    Knob(
        "drain_dir",
        None,
        _directory,
        "durable directory that all nodes see: SIGTERM drains to it, a start looks into it",
    ),
    Knob("drain_budget_s", 25.0, _seconds, "longest time that a drain on SIGTERM may take"),
    Knob("busy_wait_s", 5.0, _seconds, "longest wait for a slot that is still needed, before the ranks skip a save"),
    Knob("deadline_s", 600.0, _seconds, "longest wait for anything"),
    Knob("tune_memcpy", False, _flag, "mlflashpoint.run sets glibc's streaming-store threshold for the whole job"),
    Knob("log_level", "INFO", _log_level, "log level of the logger mlflashpoint"),
    Knob("strict", False, _flag, "raise instead of failing open (tests only)"),
)

BY_VARIABLE: dict[str, Knob] = {knob.variable: knob for knob in KNOBS}
BY_NAME: dict[str, Knob] = {knob.name: knob for knob in KNOBS}


def unknown_settings(environ: Mapping[str, str]) -> list[SettingError]:
    """One error per ``MLFLASHPOINT_`` variable that no setting has, with the nearest known name as remedy."""
    errors = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in BY_VARIABLE:
            near = difflib.get_close_matches(variable, BY_VARIABLE, n=1)
            remedy = f"did you mean {near[0]}?" if near else "see 'mlflashpoint doctor' for the known settings"
            errors.append(SettingError("unknown setting", setting=variable, value=environ[variable], remedy=remedy))
    return errors


def job_id_from(environ: Mapping[str, str]) -> tuple[str, str]:
    """``(job id, variable it came from)``; raises SettingError when there is none or it is not a plain name."""
    for variable in JOB_ID_SOURCES:
        value = environ.get(variable, "").strip()
        if not value or (variable == "TORCHELASTIC_RUN_ID" and value == "none"):
            continue
        check_name("a job id", value, setting=variable)
        return value, variable
    raise SettingError(
        "no job id, and none is guessed",
        setting="MLFLASHPOINT_JOB_ID",
        remedy="set it to a name that is unique to the job and stays the same when the job restarts",
    )


@dataclass(frozen=True)
class StoreConfig:
    """What the memory store of one job needs to know; every field is the setting of the same name.

    Raises:
        SettingError: for a value out of range, and from ``from_env`` for a malformed setting or a missing job id.
    """

    job_id: str
    base_container: Path
    allow_non_tmpfs: bool = False
    async_save: bool = True
    replicas: int = 1
    failure_domain: str = ""
    transport: str = "gloo"
    keep_versions: int = 2
    busy_wait_s: float = 5.0
    deadline_s: float = 600.0
    strict: bool = False
    drain_dir: Path | None = None
    drain_budget_s: float = 25.0

    def __post_init__(self) -> None:
        check_name("a job id", self.job_id, setting="MLFLASHPOINT_JOB_ID")
        object.__setattr__(
            self, "base_container", _directory("MLFLASHPOINT_BASE_CONTAINER", os.fspath(self.base_container))
        )
        if self.drain_dir is not None:
            object.__setattr__(self, "drain_dir", _directory("MLFLASHPOINT_DRAIN_DIR", os.fspath(self.drain_dir)))
            if self.base_container in (self.drain_dir, *self.drain_dir.parents):
                raise SettingError(
                    "the drain directory lies in the base container",
                    setting="MLFLASHPOINT_DRAIN_DIR",
                    value=str(self.drain_dir),
                    remedy="set it to a durable directory that all nodes see",
                )
        transport = BY_NAME["transport"]
        object.__setattr__(self, "transport", transport.parse(transport.variable, self.transport))
        for name in ("replicas", "keep_versions", "busy_wait_s", "deadline_s", "drain_budget_s"):
            BY_NAME[name].read({BY_NAME[name].variable: str(getattr(self, name))})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> StoreConfig:
        """Read the environment; ``overrides`` are fields of this class and go before it."""
        env = os.environ if environ is None else environ
        values: dict[str, Any] = {
            name: BY_NAME[name].read(env)
            for name in (
                "allow_non_tmpfs",
                "replicas",
                "transport",
                "keep_versions",
                "busy_wait_s",
                "deadline_s",
                "strict",
                "drain_dir",
                "drain_budget_s",
            )
        }
        values["async_save"] = BY_NAME["async"].read(env)
        values["failure_domain"] = BY_NAME["failure_domain"].read(env) or ""
        values["base_container"] = BY_NAME["base_container"].read(env)
        values.update(overrides)
        if "job_id" not in values:
            values["job_id"] = job_id_from(env)[0]
        if values["base_container"] is None:
            values["base_container"] = Path(f"/dev/shm/mlflashpoint-{os.getuid()}") / values["job_id"]
        return cls(**values)
