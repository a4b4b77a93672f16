"""The folder of a version, with the small files that Megatron-Core looks for before it asks a load strategy.

``common.pt`` and ``metadata.json`` are kept in every rank's shard; what lies in the folder is a view of them. It is
made on each node when the version is saved and made again when it is found, so a replaced node has it too. The id of a
named group's version lies in the group's folder, so that no group sees, or removes, the files of another.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mlflashpoint.adapter.pytorch.shards import Shards
from mlflashpoint.core.files import replace_file
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.errors import ContainerError, FlashpointError, StateTypeError

log = logging.getLogger("mlflashpoint.adapter")

COMMON = "common.pt"
CONFIG = "metadata.json"
#: the configuration says that a folder is a checkpoint, so it is written last
FILES = (COMMON, CONFIG)
#: characters of torch's reason why it unpickles something not
_SHOWN = 300


def make_folder(version: str) -> Path:
    """The version's folder, made on this node if it is missing; raises ContainerError."""
    folder = Path(version)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ContainerError(
            f"the version's folder can't be made: {error.strerror}", path=folder, remedy="open the store first"
        ) from error
    return folder


def write_files(version: str, files: Mapping[str, bytes]) -> None:
    """Put the files into the version's folder on this node, each as a whole; raises ContainerError."""
    folder = make_folder(version)
    for name, content in files.items():
        path = folder / name
        try:
            with contextlib.suppress(FileNotFoundError):
                if path.read_bytes() == content:
                    continue
            replace_file(path, content)
        except OSError as error:
            raise ContainerError(f"{name} can't be written: {error.strerror}", path=path) from error


def restore_files(version: str, shards: Shards, rank: int) -> None:
    """Put the files that the version's shards carry into its folder on this node.

    Args:
        version: its container.
        shards: its shards.
        rank: rank of the version whose shard is nearest.

    Raises:
        StateTypeError: the common state can't be unpickled here.
        FlashpointError: they can't be read or written.
    """
    found: dict[str, bytes] = {}
    for name in FILES:
        # Megatron-Core's own save leaves the common state with rank 0 alone.
        for source in dict.fromkeys((rank, 0)):
            content = shards.side_file(source, name)
            if content is not None:
                found[name] = content
                break
    if COMMON in found:
        _require_loadable(found[COMMON], version, rank)
    if found:
        write_files(version, found)


def _require_loadable(common: bytes, version: str, rank: int) -> None:
    """Unpickle the common state as Megatron-Core will, which then would tell no other rank that it can't be."""
    try:
        torch.load(io.BytesIO(common), map_location="cpu")
    except Exception as error:
        raise StateTypeError(
            f"the common state can't be unpickled here: {type(error).__name__}: {_in_short(error)}",
            rank=rank,
            path=version,
            remedy="import what defines its types, and allow them (torch.serialization.add_safe_globals)",
        ) from error


def _in_short(error: Exception) -> str:
    """The reason alone: torch puts a page of advice around it."""
    return " ".join(str(error).split("WeightsUnpickler error:")[-1].split())[:_SHOWN]


def remove_folders(group_folder: Path, keep: Iterable[int]) -> None:
    """Remove the folders of one group's versions that are not kept; failures are logged only."""
    kept = set(keep)
    try:
        for entry in os.scandir(group_folder):
            step = CheckpointContainerId.parse_version_container_step(entry.name)
            if step is not None and step not in kept and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
    except (OSError, FlashpointError) as error:
        log.warning("folders of old versions could not be removed from %s: %s", group_folder, error)
