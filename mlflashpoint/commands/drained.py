"""What one job has drained to a durable directory, as its files say: for the commands that look into containers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mlflashpoint.commands.inventory import Found, Inventory, Version, problems_of, take_stock, versions_of
from mlflashpoint.core.container import Container, read_container
from mlflashpoint.core.draindir import VERSION, DrainDir
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.record import DRAIN_NODE
from mlflashpoint.errors import ContainerError, DrainError, FlashpointError
from mlflashpoint.settings import job_id_from

#: what the commands take that look into either
EITHER = "base container or drain directory"
_LEFT_OVER = re.compile(r"rank-[0-9]{1,9}-tmp-.*|rank-[0-9]{1,9}\.data")


def stock_of_either(path: Path) -> Inventory:
    """Read a container or a drain directory; changes nothing.

    Raises:
        ContainerError: it is neither, or can't be read.
        DrainError: it holds what several jobs have drained, or can't be read.
    """
    if read_container(path) is not None:
        return take_stock(path)
    try:
        job = _job_at(path)
        if job is None:
            raise ContainerError(
                "no memory container is here, and nothing was drained to here",
                path=path,
                remedy="give the job's base container, or its drain directory",
            )
        return _stock_of_job(job)
    except OSError as error:
        raise DrainError(
            f"the drain directory can't be read: {error.strerror or error}",
            path=error.filename or path,
            remedy="run this as the job's user",
        ) from error


def _job_at(path: Path) -> Path | None:
    """The folder of the job whose drained versions are meant by ``path``, which is that folder or the one above."""
    if _groups(path):
        return path
    jobs, closed = [], None
    for folder in _folders(path):
        try:
            jobs += [folder] if _groups(folder) else []
        except PermissionError as error:
            # Another user's job has drained to here, too.
            closed = error
    if closed is not None and not jobs:
        raise closed
    if len(jobs) > 1:
        mine = [folder for folder in jobs if folder.name == _own_job_id()]
        if not mine:
            raise DrainError(
                f"{len(jobs)} jobs have drained to here: {', '.join(folder.name for folder in jobs[:8])}",
                path=path,
                remedy=f"give the folder of one of them, for example {jobs[0]}",
            )
        return mine[0]
    return jobs[0] if jobs else None


def _stock_of_job(job: Path) -> Inventory:
    slots: list[Found] = []
    problems: list[str] = []
    versions: list[Version] = []
    groups = _groups(job)
    for group in groups:
        target = DrainDir(job.parent, job.name, group)
        found = []
        for folder in target.versions():
            shards = target.shards(folder)
            found += [Found(group, f"{group}/{folder.name}/{shard.path.name}", shard) for shard in shards]
            problems += _unfinished(folder)
        slots += found
        problems += problems_of(found)
        records = [one.slot.record for one in found if one.slot.record is not None]
        # As at a start, which knows from the shards alone what a job that lost its memory went on from.
        starts = [Incarnation(one.incarnation, one.run, one.created_s, one.resumed_from) for one in records]
        versions += versions_of(group, found, Lineage.of(starts), where="drained")
    container = Container(job, job.name, os.stat(job).st_uid, DRAIN_NODE)
    return Inventory(container, tuple(groups), (), tuple(slots), tuple(versions), tuple(problems), drained=True)


def _unfinished(folder: Path) -> Iterator[str]:
    """Of a version's folder, what a drain has left there that it did not finish."""
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    parts = {name.rpartition(".")[0] for name in names if _LEFT_OVER.match(name)}
    for part in sorted(parts):
        if not {f"{part}.commit", f"{part}.quarantined"} & names or "-tmp-" in part:
            yield f"a drain that is not finished, or was broken off [path {folder / part}]"
    if not names:
        yield f"a drain that has left nothing [path {folder}]"


def _groups(job: Path) -> list[str]:
    """The groups of which something was drained, if that is the folder of a job."""
    return [group.name for group in _folders(job) if any(map(VERSION.fullmatch, _names(group)))]


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in map(path.joinpath, _names(path)) if entry.is_dir())


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _own_job_id() -> str:
    try:
        return job_id_from(os.environ)[0]
    except FlashpointError:
        return ""
