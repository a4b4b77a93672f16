"""Names of what a job stores: containers (folders) and objects (files), and the name of one version's container.

An id is text: it compares, hashes and formats as the absolute path that it is, without a trailing slash. What
belongs to what is decided segment by segment, so that ``/job-1`` never claims ``/job-10``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlflashpoint.errors import CheckpointIdError

#: steps are written without leading zeros: one step has exactly one name
_VERSION = re.compile(r"step-(0|[1-9][0-9]{0,18})_ckpt")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class _Id(str):
    """An absolute path below the root; see the two kinds below."""

    __slots__ = ()

    def __new__(cls, path: str) -> _Id:
        if not isinstance(path, str):
            raise CheckpointIdError(f"an id is text, not {type(path).__name__}", remedy="pass a path as str")
        trimmed = str.__str__(path).rstrip("/")
        if not path.startswith("/") or not trimmed:
            raise CheckpointIdError("an id is an absolute path below /", path=path, remedy="begin it with /")
        for segment in trimmed[1:].split("/"):
            if not segment.strip():
                raise CheckpointIdError("an id has no empty segment", path=path, remedy="remove the doubled slash")
            if segment.endswith("."):
                raise CheckpointIdError("no segment of an id ends with a dot", path=path, remedy="rename the segment")
            if _CONTROL.search(segment):
                raise CheckpointIdError("an id has no control characters", path=repr(path), remedy="rename the segment")
        return super().__new__(cls, trimmed)

    @property
    def name(self) -> str:
        """The last segment."""
        return self.rpartition("/")[2]

    def get_parent(self, levels_up: int = 1) -> CheckpointContainerId | None:
        """The container ``levels_up`` levels above, or None when that would be the root or beyond.

        Raises:
            CheckpointIdError: if ``levels_up`` is below 1.
        """
        if levels_up < 1:
            raise CheckpointIdError(f"levels_up is {levels_up}, not 1 or more")
        segments = self[1:].split("/")
        kept = segments[:-levels_up]
        return CheckpointContainerId("/" + "/".join(kept)) if kept else None

    def is_within(self, container: str) -> bool:
        """Whether this id is ``container`` or lies below it; compares whole segments, never prefixes of them."""
        whole = container.rstrip("/")
        return self == whole or self.startswith(whole + "/")


class CheckpointContainerId(_Id):
    """A folder that holds versions or objects.

    Args:
        path: absolute path; no segment is empty or ends with a dot. A trailing slash is dropped.

    Raises:
        CheckpointIdError: if ``path`` is none (it is a ValueError too).
    """

    __slots__ = ()

    @staticmethod
    def create_child(parent: CheckpointContainerId, child: str) -> CheckpointContainerId:
        """The container ``child`` (one segment) in ``parent``; raises CheckpointIdError."""
        return CheckpointContainerId(_join(parent, child))

    @staticmethod
    def format_version_container(step: int) -> str:
        """The folder name of the version of ``step``: ``step-<n>_ckpt``; raises CheckpointIdError."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**19:
            raise CheckpointIdError(f"step {step!r} is not a whole number from 0")
        return f"step-{step}_ckpt"

    @staticmethod
    def parse_version_container_step(name: str) -> int | None:
        """The step that the folder name stands for, or None: a near miss (``step-7_ckpt_backup``) is no version."""
        match = _VERSION.fullmatch(name) if isinstance(name, str) else None
        return int(match[1]) if match else None

    @property
    def step(self) -> int | None:
        """The step if this is a version's container, else None."""
        return self.parse_version_container_step(self.name)

    @staticmethod
    def newest_version(ids: Iterable[CheckpointContainerId]) -> CheckpointContainerId | None:
        """The version container of the highest step among ``ids`` (compared as a number), or None."""
        versions = [(step, entry) for entry in ids if (step := entry.step) is not None]
        return max(versions)[1] if versions else None


class CheckpointObjectId(_Id):
    """A file within a container; same rules as for CheckpointContainerId."""

    __slots__ = ()

    @staticmethod
    def from_container(parent: CheckpointContainerId, name: str) -> CheckpointObjectId:
        """The object ``name`` (one segment) in ``parent``; raises CheckpointIdError."""
        return CheckpointObjectId(_join(parent, name))

    @property
    def container(self) -> CheckpointContainerId:
        """The container that holds this object; raises CheckpointIdError if that is the root."""
        parent = self.get_parent()
        if parent is None:
            raise CheckpointIdError("an object lies in a container, not in /", path=self)
        return parent


def _join(parent: CheckpointContainerId, name: str) -> str:
    if not isinstance(parent, CheckpointContainerId):
        raise CheckpointIdError(f"the parent is a CheckpointContainerId, not {type(parent).__name__}")
    if not isinstance(name, str) or "/" in name or not name.strip():
        raise CheckpointIdError(f"a child's name is one segment, not {name!r}")
    return f"{parent}/{name}"
