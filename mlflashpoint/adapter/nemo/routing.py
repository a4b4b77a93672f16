"""Which paths name memory versions of one base container: exact, whatever way the path is written."""

from __future__ import annotations

import os

from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.errors import CheckpointIdError

#: what NeMo and Lightning put behind or below the path of a checkpoint
_SUFFIX = ".ckpt"


class Routing:
    """Recognises the paths of one container.

    A relative path, a symbolic link and a trailing slash name the folder that they lead to; ``/job-1`` never claims
    ``/job-10``.

    Args:
        base: the base container.

    Raises:
        CheckpointIdError: ``base`` can't name a container.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        self.base = canonical(base)

    def is_memory(self, path: object) -> bool:
        """Whether ``path`` is the container or lies in it; URLs and None never do."""
        return isinstance(path, (str, os.PathLike)) and self._within(path) is not None

    def step_of(self, path: str | os.PathLike[str]) -> int | None:
        """Step of the version that ``path`` names or lies in, None if it names none."""
        found = self._within(path)
        if found is None or found == self.base:
            return None
        segment = found[len(self.base) + 1 :].partition("/")[0]
        return CheckpointContainerId.parse_version_container_step(segment.removesuffix(_SUFFIX))

    def path_of(self, step: int) -> str:
        """The virtual folder of a version."""
        return str(CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step)))

    def _within(self, path: str | os.PathLike[str]) -> CheckpointContainerId | None:
        if "://" in os.fspath(path):
            return None
        try:
            found = canonical(path)
        except (CheckpointIdError, OSError):
            return None
        return found if found.is_within(self.base) else None


def canonical(path: str | os.PathLike[str]) -> CheckpointContainerId:
    """The id of the folder that ``path`` leads to; raises CheckpointIdError if it can't be one."""
    return CheckpointContainerId(os.path.realpath(os.path.abspath(os.fspath(path))))
