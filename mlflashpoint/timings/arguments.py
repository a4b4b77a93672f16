"""Command-line arguments that ``mlflashpoint timings`` and ``mlflashpoint ab`` have in common."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings import console

_LABEL = re.compile(r"[\w][\w.+-]{0,63}")
#: of a label in a file name, which takes 255 with what stands around it
_LABEL_BYTES = 100
#: of the options of a comparison
_DEFAULTS: Mapping[str, Any] = {"skip_first": 0, "tolerance_percent": 2.0, "seed": 0}
_OF_HEADLINE = ("durable", "substitute")


class Once(argparse.Action):
    """An option that stands once: the second one would silently win."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        seen = namespace.__dict__.setdefault("_seen", set())
        if self.dest in seen:
            parser.error(f"{option} is given twice")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Complains in one line; the exit code for a usage error is 2."""

    def error(self, message: str) -> Any:
        raise TimingsError(message, remedy=f"see '{self.prog} --help'")

    def _print_message(self, message: str, file: Any = None) -> None:
        console.show(message)


def is_label(text: str) -> bool:
    """Whether it can name an arm, and so be part of file names and job ids."""
    return _LABEL.fullmatch(text) is not None and len(text.encode()) <= _LABEL_BYTES


def label(text: str) -> str:
    """The name of an arm."""
    if not is_label(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no label: use letters, digits, '.', '_', '+' and '-', up to 64")
    return text


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum or (maximum is not None and number > maximum):
            limits = f"from {minimum}" + ("" if maximum is None else f" to {maximum}")
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return number

    return parse


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def output(text: str) -> Path | None:
    """Where a result goes; ``-`` is standard output, as of many commands, and is told by None."""
    return None if text == "-" else Path(text)


def output_file(text: str) -> Path:
    """The same for what has no place on standard output, where something else goes."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is no name for it: standard output is taken; name a file or a folder")
    return Path(text)


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """The options that say how two arms are compared."""
    parser.add_argument(
        "--skip-first",
        type=whole(0),
        default=_DEFAULTS["skip_first"],
        metavar="N",
        action=Once,
        help="leave out the first N saves of each timer and run: a first save is cold",
    )
    parser.add_argument(
        "--control", metavar="TIMER", action=Once, help="the timer that no arm changes; default: that of durable saves"
    )
    parser.add_argument(
        "--tolerance",
        type=number,
        default=_DEFAULTS["tolerance_percent"],
        metavar="PERCENT",
        action=Once,
        help="a control that differs by less is never held against the comparison (default 2)",
    )
    parser.add_argument(
        "--headline",
        action="store_true",
        help="also print durable save against substituted save, with the mode in which it is a saving",
    )
    parser.add_argument("--durable", metavar="TIMER", action=Once, help="the headline's timer in the baseline")
    parser.add_argument("--substitute", metavar="TIMER", action=Once, help="the headline's timer in the candidate")
    parser.add_argument(
        "--seed",
        type=whole(0),
        default=_DEFAULTS["seed"],
        metavar="N",
        action=Once,
        help="seed of the bootstrap (default 0)",
    )


def comparison_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``add_comparison`` read, as keywords of ``compare``.

    Raises:
        TimingsError: a timer of the headline is named, and no headline is asked for.
    """
    for name in _OF_HEADLINE:
        if getattr(arguments, name) is not None and not arguments.headline:
            raise TimingsError(f"--{name} names a timer of the headline", remedy="give --headline too")
    return {
        "skip_first": arguments.skip_first,
        "control": arguments.control,
        "tolerance_percent": arguments.tolerance,
        "headline": arguments.headline,
        "durable": arguments.durable,
        "substitute": arguments.substitute,
        "seed": arguments.seed,
    }


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """The command-line arguments that ``comparison_options`` reads as ``options``."""
    found = []
    for name, value in options.items():
        if name in _OF_HEADLINE and not options.get("headline"):
            continue
        flag = "--" + name.removesuffix("_percent").replace("_", "-")
        if value is True:
            found.append(flag)
        elif value not in (None, False, _DEFAULTS.get(name)):
            found += [flag, str(value)]
    return found


def different_files(paths: Sequence[Path | None]) -> None:
    """Raises TimingsError if two of an invocation's files are the same one."""
    seen = set()
    for path in paths:
        if path is None:
            continue
        resolved = os.path.realpath(path)
        if resolved in seen:
            raise TimingsError("the same file is named twice", path=path)
        seen.add(resolved)
