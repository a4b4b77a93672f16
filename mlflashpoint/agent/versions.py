"""Whether an installed version lies in the range that a patch was tested with.

A small part of PEP 440, so that the core install needs no further package: releases, pre-releases, post and
development releases, local labels, and ranges such as ``>=0.4.2,<0.7``.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

_VERSION = re.compile(
    r"""v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)
    (?:[-_.]?(?P<pre>a|alpha|b|beta|c|rc|pre|preview)[-_.]?(?P<pre_n>\d*))?
    (?:[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d*)|-(?P<post_i>\d+))?
    (?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d*))?
    (?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?""",
    re.VERBOSE,
)
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*(\S+)")
_PRE = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_FINAL = 3

Key = tuple[int, tuple[int, ...], tuple[int, int], int, float]


def version_key(text: str) -> Key:
    """A key that orders versions; raises ValueError for what is no version."""
    match = _VERSION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    part = match.groupdict()
    release = [int(number) for number in part["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    if part["pre"]:
        stage = (_PRE[part["pre"]], int(part["pre_n"] or 0))
    else:
        # a bare development release comes before the first alpha
        stage = (-1, 0) if part["dev"] and not part["post"] and part["post_i"] is None else (_FINAL, 0)
    post = int(part["post_n"] or part["post_i"] or 0) + 1 if part["post"] or part["post_i"] is not None else 0
    dev = int(part["dev_n"] or 0) if part["dev"] else float("inf")
    return int(part["epoch"] or 0), tuple(release), stage, post, dev


def in_range(version: str, wanted: str) -> bool:
    """Whether ``version`` satisfies every clause of ``wanted`` (comma separated; empty allows all).

    ``<0.7`` leaves out the pre-releases of 0.7 too: they carry the next release's interface.

    Raises:
        ValueError: for a malformed version or clause.
    """
    key = version_key(version)
    for clause in filter(None, (text.strip() for text in wanted.split(","))):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            raise ValueError(f"not a version clause: {clause!r}")
        operator, bound = match[1], version_key(match[2])
        holds = {
            ">=": key >= bound,
            ">": key > bound,
            "<=": key <= bound,
            "<": key < bound and not (key[:2] == bound[:2] and key[2] < (_FINAL, 0) <= bound[2]),
            "==": key == bound,
            "!=": key != bound,
        }[operator]
        if not holds:
            return False
    return True


def installed_version(distribution: str, package: str | None = None) -> str | None:
    """The version of ``distribution`` from its metadata, or None.

    A source checkout on PYTHONPATH has no metadata; ``package`` names an importable package whose ``__version__``
    counts then, if it is imported already. Nothing is imported here.
    """
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None and package is not None:
        version = getattr(sys.modules.get(package), "__version__", None)
    return version if isinstance(version, str) else None
