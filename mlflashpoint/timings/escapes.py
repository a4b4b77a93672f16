"""Text of logs, file names and result files, made fit to be shown: nothing of it is a command to a terminal."""

from __future__ import annotations

import html
import re

# controls (with line ends), marks that turn the direction of writing, line separators, and what is no Unicode
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    r"""``text`` on one line, with ``\x1b`` or ``\udcff`` in the place of what must not be shown as it is."""
    return _HARMFUL.sub(_escape, text)


def markup(text: str) -> str:
    """The same as content of an HTML element or attribute."""
    return html.escape(visible(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
