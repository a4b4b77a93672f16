"""Where the start-up file lies, and where Python would meet it. Imported by commands only, never at start-up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

#: the same as in sitecustomize.py, which can't import it
SUPPORTED = ((3, 10), (3, 14))
OFF = ("", "0", "false", "no", "off")


def folder() -> Path:
    """The folder to put on PYTHONPATH: inside the package in a wheel, beside it in the source tree.

    Raises:
        FileNotFoundError: the installation lacks it.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "sitecustomize", package.parent / "sitecustomize"):
        if (candidate / "sitecustomize.py").is_file():
            return candidate
    raise FileNotFoundError(f"no sitecustomize.py in or beside {package}: reinstall mlflashpoint")


def prepended(pythonpath: str | None) -> str:
    """``pythonpath`` with our folder first, and only there.

    An empty entry means the current directory to Python, so none is made where there was none.
    """
    ours = os.path.realpath(folder())
    entries = pythonpath.split(os.pathsep) if pythonpath else []
    return os.pathsep.join(
        [str(folder()), *(entry for entry in entries if not entry or os.path.realpath(entry) != ours)]
    )


def is_on(value: str | None) -> bool:
    """Whether the start-up file would start the agent for this value of MLFLASHPOINT_ENABLED."""
    return (value or "").strip().lower() not in OFF


@dataclass(frozen=True)
class StartUpFile:
    """A ``sitecustomize`` on the path, in the order in which Python looks."""

    path: str
    ours: bool


def entries(environ: Mapping[str, str]) -> list[str]:
    """The path on which this Python looks for start-up files when its environment is ``environ``."""
    # site has run before the folder of the script (or the current one) was put in front
    path = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    if sys.flags.ignore_environment:
        return path
    own = {os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    given = environ.get("PYTHONPATH", "")
    return [
        *(given.split(os.pathsep) if given else []),
        *(entry for entry in path if os.path.realpath(entry) not in own),
    ]


def chain(path: Iterable[str]) -> list[StartUpFile]:
    """Every ``sitecustomize`` on ``path``.

    The first is the one that Python runs; if it is ours, it runs the next one that is not.
    """
    ours = os.path.realpath(folder())
    found = []
    for entry in path:
        spec = PathFinder.find_spec("sitecustomize", [entry])
        if spec is None or not spec.has_location or spec.origin is None:
            continue
        file = StartUpFile(spec.origin, os.path.dirname(os.path.realpath(spec.origin)) == ours)
        if file not in found:
            found.append(file)
    return found
