"""``mlflashpoint install``: this environment's Python loads the start-up file with no PYTHONPATH.

It writes one ``.pth`` file into site-packages, and not a ``sitecustomize.py``: there can be only one of those, and an
environment that has its own keeps it, first on the path, run by Python itself. A ``.pth`` file that merely adds our
folder to the path would not do either, because a sitecustomize before it (Debian ships one) would hide ours. So the
file holds a start-up line; PEP 829 deprecates those from Python 3.15 on, which is beyond what mlflashpoint supports.
The line does nothing when the agent is off, and nothing when mlflashpoint is gone: such files outlive a ``pip
uninstall``.
"""

from __future__ import annotations

import argparse
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mlflashpoint.agent import bootstrap
from mlflashpoint.errors import FlashpointError

FILE_NAME = "mlflashpoint-agent.pth"


def line() -> str:
    """The start-up line; it names the start-up file by its absolute path and runs it under another name.

    The file chains to the next sitecustomize only under its own name: here Python runs that one itself.
    """
    path = str(bootstrap.folder() / "sitecustomize.py")
    switch = "os.environ.get('MLFLASHPOINT_ENABLED', '0') not in ('', '0')"
    run = (
        "exec(compile(open(_mlf, 'rb').read(), _mlf, 'exec'), {'__name__': 'mlflashpoint_start_up', '__file__': _mlf})"
    )
    return f"import os; _mlf = {path!r}; {switch} and os.path.isfile(_mlf) and {run}\n"


def pth_path() -> Path:
    """Where the file belongs in this environment.

    Raises:
        FlashpointError: Python does not read ``.pth`` files from its own site-packages.
    """
    folder = Path(sysconfig.get_path("purelib"))
    known = {os.path.realpath(entry) for entry in site.getsitepackages()}
    if os.path.realpath(folder) not in known:
        raise FlashpointError(
            "Python does not read .pth files from its package folder",
            path=folder,
            remedy=f"put {bootstrap.folder()} on PYTHONPATH instead",
        )
    return folder / FILE_NAME


def install() -> tuple[Path, bool]:
    """Write the file; returns ``(its path, whether anything changed)``.

    Raises:
        FlashpointError: the folder can't be written.
    """
    path = pth_path()
    wanted = line()
    if path.is_file() and path.read_text() == wanted:
        return path, False
    temporary = path.with_name(f".{FILE_NAME}.tmp-{os.getpid()}")
    try:
        temporary.write_text(wanted)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True) if os.access(path.parent, os.W_OK) else None
        raise _unwritable(path, error) from error
    return path, True


def uninstall() -> tuple[Path, bool]:
    """Remove the file; returns ``(its path, whether it was there)``.

    Raises:
        FlashpointError: the folder can't be written.
    """
    path = pth_path()
    try:
        path.unlink()
    except FileNotFoundError:
        return path, False
    except OSError as error:
        raise _unwritable(path, error) from error
    return path, True


def _unwritable(path: Path, error: OSError) -> FlashpointError:
    return FlashpointError(
        f"can't write this environment's package folder: {error.strerror}",
        path=path.parent,
        remedy=f"use a virtual environment of your own, or put {bootstrap.folder()} on PYTHONPATH",
    )


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when this environment can't be changed."""
    parser = argparse.ArgumentParser("mlflashpoint install", description="Load the agent without PYTHONPATH.")
    parser.parse_args(argv)
    try:
        path, changed = install()
    except FlashpointError as error:
        sys.stderr.write(f"mlflashpoint: {error}\n")
        return 1
    sys.stdout.write(f"{'installed' if changed else 'already installed'}: {path}\n")
    sys.stdout.write("The agent starts in processes that have MLFLASHPOINT_ENABLED=1.\n")
    return 0
