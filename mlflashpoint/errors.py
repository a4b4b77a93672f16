"""One named exception per kind of failure; each carries what a person needs to act on it.

This module imports nothing: it is used by the start-up path, by the core and by the replication alike.
"""

from __future__ import annotations

#: characters of a setting's value in a message
_SHOWN = 300


class FlashpointError(Exception):
    """Base of every error that mlflashpoint raises.

    Args:
        message: what happened, in one sentence without a full stop.
        remedy: what the reader can do about it.
        setting: environment variable at fault, for example ``MLFLASHPOINT_JOB_ID``.
        value: the value that ``setting`` had.
        rank: global rank that failed.
        step: training step concerned.
        path: file or directory concerned.

    ``str(error)`` is one line and names all of the above that were given.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        setting: str | None = None,
        value: object = None,
        rank: int | None = None,
        step: int | None = None,
        path: object = None,
    ) -> None:
        self.message = message
        self.remedy = remedy
        self.setting = setting
        self.value = value
        self.rank = rank
        self.step = step
        self.path = None if path is None else str(path)
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        where = []
        if self.setting is not None:
            where.append(self.setting if self.value is None else f"{self.setting}={_short(repr(self.value))}")
        where += [
            f"{name} {value}"
            for name, value in (("rank", self.rank), ("step", self.step), ("path", self.path))
            if value is not None
        ]
        if where:
            parts.append(f" [{', '.join(where)}]")
        if self.remedy:
            parts.append(f"; remedy: {self.remedy}")
        return " ".join("".join(parts).split())

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def in_words(error: BaseException) -> str:
    """Kind and text of any exception, also of one that can't tell its text."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception as broken:
        return f"{kind}, which has no text: its __str__ raised {type(broken).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _rebuild(kind: type[FlashpointError], message: str, state: dict[str, object]) -> FlashpointError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class SettingError(FlashpointError):
    """A setting is unknown, malformed, or contradicts another one."""


class CheckpointIdError(FlashpointError, ValueError):
    """A path or name is no checkpoint id."""


class RankUnknownError(SettingError):
    """The process can't tell its rank or the world size; it is never taken for rank 0."""


class ContainerError(FlashpointError):
    """The base container can't be used: not tmpfs, not writable, or of an unsafe kind."""


class StoreInUseError(ContainerError):
    """The process has a store for the container and the group already; a second one would talk in its name."""


class StoreClosedError(FlashpointError, ValueError):
    """The store was closed; it is not opened again behind its owner's back."""


class ForeignContainerError(ContainerError):
    """The base container belongs to another job or to another user."""


class StoreFullError(ContainerError):
    """The memory store has less room than the state needs; names need and have in bytes."""


class SlotBusyError(FlashpointError):
    """Some rank still needs all its slots, so all skip a save; it is no fault of the state or of the store."""


class StepError(FlashpointError):
    """A step is no whole number, or below 0 where it is to be saved; or its save has failed already."""


class StateTypeError(FlashpointError):
    """A state holds an object of a type that is not plain data and not registered."""


class StateMismatchError(FlashpointError):
    """The stored state and the state to load into differ in names, shapes or dtypes."""


class UnsupportedStrategyError(FlashpointError):
    """A framework's training strategy keeps its state in a way that can't be stored per rank; names the strategy."""


class ShardFormatError(FlashpointError):
    """A shard's commit record or index is malformed, too large, or of an unknown format version."""


class ShardCorruptError(FlashpointError):
    """A shard's bytes do not have the digest that its index records."""


class NoVersionError(FlashpointError):
    """No version can be recovered; ``message`` gives the reason for each that was looked at."""


class TopologyMismatchError(FlashpointError):
    """A version was saved by another world size or parallel layout and can't be resharded."""


class DeadlineExceededError(FlashpointError):
    """A wait reached its deadline; names whom it was waiting for."""


class PeerError(FlashpointError):
    """Another rank failed, is of another job or version, or went away."""


class ReplicationError(PeerError):
    """A replica could not be delivered, checked or fetched."""


class DrainError(FlashpointError):
    """A shard could not be copied to the drain directory; names the directory, and what it lacks."""


class OverwrittenError(DrainError):
    """The running job has overwritten a version while it was being copied; nothing is corrupt."""


class TimingsError(FlashpointError):
    """A log, a result file or an argument of ``mlflashpoint timings`` or ``mlflashpoint ab`` can't be used."""


class ComparisonOptionError(TimingsError):
    """An option of a comparison asks for what the samples do not hold.

    Args:
        message: as of ``FlashpointError``.
        option: the keyword of ``compare`` without which the comparison can be made.
        remedy: as of ``FlashpointError``.
    """

    def __init__(self, message: str, *, option: str, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.option = option
