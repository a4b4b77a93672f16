"""Write the settings table of README.md from the one table in the code: ``python -m tools.settings_table``."""

from __future__ import annotations

from pathlib import Path

from mlflashpoint.settings import KNOBS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- settings -->\n", "<!-- /settings -->"


def table() -> str:
    """The table as Markdown, one row per setting."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for knob in KNOBS:
        default = {None: "unset", True: "1", False: "0"}.get(knob.default, knob.default)
        rows.append(f"| `{knob.variable}` | {default} | {knob.meaning} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """``text`` with the table between its two markers."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
