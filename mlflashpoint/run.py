"""``python [options] -m mlflashpoint.run [options] train.py ...``: the same Python, with the agent on.

It sets the environment and replaces itself by the interpreter it runs in, with that one's options kept. So the job is
plain ``python train.py ...``: ``__main__``, ``sys.argv``, ``sys.path``, tracebacks, exit codes and signals are
Python's own, and so is everything that can stand in the place of the script: ``-m module``, ``-c code``, a folder, a
zipped application, ``-``, or nothing. Launchers pass the environment on: ``-m mlflashpoint.run -m
torch.distributed.run ...`` reaches every rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping, Sequence

from mlflashpoint.agent import bootstrap
from mlflashpoint.errors import SettingError
from mlflashpoint.settings import BY_NAME

#: glibc copies blocks above this many bytes with streaming stores
_STREAMING_STORES = "glibc.cpu.x86_non_temporal_threshold=1048576"

_USAGE = """\
usage: python [python options] -m mlflashpoint.run [options] [python options] SCRIPT [arguments]
       (SCRIPT: a file, a folder, a zipped application, -m MODULE, -c CODE, or - for standard input)

options:
  --print-path   print the folder that PYTHONPATH needs for MLFLASHPOINT_ENABLED=1 to work without this command
  --tune-memcpy  have glibc use streaming stores for copies above 1 MiB, in the whole job (MLFLASHPOINT_TUNE_MEMCPY=1)
  --help         show this text

MLFLASHPOINT_ENABLED=0 in the environment wins: the same command is then the job without the agent.
"""


def interpreter_options(orig_argv: Sequence[str]) -> list[str]:
    """The options among ``orig_argv`` that precede ``-m mlflashpoint.run`` (or the path of this file)."""
    options: list[str] = []
    rest = iter(orig_argv[1:])
    for token in rest:
        if token.startswith("--"):
            options.append(token)
            if token == "--check-hash-based-pycs":
                options.append(next(rest, "default"))
            continue
        if not token.startswith("-") or token == "-":
            return options
        for place, letter in enumerate(token[1:], start=1):
            if letter in "mc":
                return options + ([token[:place]] if place > 1 else [])
            if letter in "WX":
                options.append(token)
                if place == len(token) - 1:
                    options.append(next(rest, ""))
                break
        else:
            options.append(token)
    return options


def prepare(environ: MutableMapping[str, str], *, tune_memcpy: bool = False) -> None:
    """Make every Python that inherits ``environ`` start the agent; a switch that is set already is kept."""
    environ.setdefault("MLFLASHPOINT_ENABLED", "1")
    environ["PYTHONPATH"] = bootstrap.prepended(environ.get("PYTHONPATH"))
    # the agent itself tells of a malformed setting, once, where it is of consequence
    with contextlib.suppress(SettingError):
        tune_memcpy = tune_memcpy or BY_NAME["tune_memcpy"].read(environ)
    tunables = environ.get("GLIBC_TUNABLES", "")
    if (
        tune_memcpy
        and bootstrap.is_on(environ["MLFLASHPOINT_ENABLED"])
        and "x86_non_temporal_threshold" not in tunables
    ):
        environ["GLIBC_TUNABLES"] = f"{tunables}:{_STREAMING_STORES}" if tunables else _STREAMING_STORES


def main(argv: Sequence[str] | None = None) -> int:
    """Become the job; returns (an exit code) only when there is nothing to become."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    tune_memcpy = False
    while arguments and arguments[0] in ("--print-path", "--tune-memcpy", "--help"):
        option = arguments.pop(0)
        if option == "--help":
            sys.stdout.write(_USAGE)
            return 0
        if option == "--print-path":
            sys.stdout.write(f"{bootstrap.folder()}\n")
            return 0
        tune_memcpy = True
    prepare(os.environ, tune_memcpy=tune_memcpy)
    inert = [flag for flag, name in (("-S", "no_site"), ("-E or -I", "ignore_environment")) if getattr(sys.flags, name)]
    if inert:
        sys.stderr.write(
            f"mlflashpoint.run: under {inert[0]} Python does not read PYTHONPATH: the agent can stay off\n"
        )
    command = [sys.executable, *interpreter_options(sys.orig_argv), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
