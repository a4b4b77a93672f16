"""``mlflashpoint doctor``: is the agent on here, what will it patch, and if not, why not.

With ``--pid`` the settings are those of that process, and each patch's state and reason is what it reports itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from mlflashpoint.agent import inspection
from mlflashpoint.agent.inspection import Facts
from mlflashpoint.errors import FlashpointError


def report(pid: int | None = None) -> Facts:
    """All facts, and under ``problems`` one line for each that keeps the agent from doing its work.

    Raises:
        FlashpointError: process ``pid`` can't be looked at.
    """
    environ = os.environ if pid is None else inspection.environment_of(pid)
    facts: Facts = {
        "start_up": inspection.start_up(environ),
        "settings": inspection.settings(environ),
        "container": inspection.container(environ),
        "drain_dir": inspection.drain_dir(environ),
        "frameworks": inspection.frameworks(environ),
        "process": None if pid is None else inspection.process(pid),
    }
    facts["problems"] = _problems(facts)
    return facts


def _problems(facts: Facts) -> list[str]:
    start_up = facts["start_up"]
    # a job id that is missing does not matter while nobody wants the agent
    found = [row["error"] for row in facts["settings"] if row["error"] and (start_up["wanted"] or not row["missing"])]
    if start_up["wanted"]:
        found += [] if start_up["on"] or found else [start_up["reason"]]
        found += [facts[place]["error"] for place in ("container", "drain_dir") if facts[place]["error"]]
    found += [
        f"{row['framework']}: {row['error']}"
        for row in facts["frameworks"]
        if row["error"] and row["error"] != "not part of this build"
    ]
    for patch in (facts["process"] or {}).get("patches", []):
        if patch["state"] == "failed" or patch["faults"]:
            found.append(f"{patch['name']}: {patch['last_fault'] or patch['reason']}")
    return list(dict.fromkeys(found))


def render(facts: Facts) -> str:
    """The report as text."""
    start_up, container = facts["start_up"], facts["container"]
    lines = [
        f"agent       {'on' if start_up['on'] else 'off'}: {start_up['reason']}",
        f"python      {start_up['python']} {start_up['executable']}",
        f"start-up    {start_up['folder']}",
    ]
    for file in start_up["sitecustomize"]:
        lines.append(f"            sitecustomize {file['path']}{' (ours)' if file['ours'] else ''}")
    lines += [f"            installed {path}" for path in start_up["installed"]]
    size = ""
    if container["total"] is not None:
        size = f" on {container['kind']}, {container['free'] / 2**30:.1f} of {container['total'] / 2**30:.1f} GiB free"
    lines.append(f"container   {container['path'] or 'none'}{size}")
    if facts["drain_dir"]["path"] is not None:
        lines.append(f"drain dir   {facts['drain_dir']['path']}")
    lines.append("settings")
    width = max(len(row["variable"]) for row in facts["settings"])
    for row in facts["settings"]:
        lines.append(f"  {row['variable']:<{width}}  {row['value']!s:<16} {row['source']}")
    lines.append("frameworks")
    for framework in facts["frameworks"]:
        if framework["error"]:
            lines.append(f"  {framework['framework']}: {framework['error']}")
        for patch in framework["patches"]:
            version = f" {patch['distribution']} {patch['version'] or 'not installed'}" if patch["distribution"] else ""
            verdict = "will be patched" if patch["will_apply"] else f"will not be patched: {patch['reason']}"
            lines.append(f"  {patch['name']}{version}: {verdict}")
    if facts["process"] is not None:
        lines.append(f"process     {facts['process']['pid']} {facts['process']['reason']}".rstrip())
        for patch in facts["process"]["patches"]:
            last = f", last {patch['last_fault']}" if patch["last_fault"] else ""
            counts = f"calls {patch['calls']}, faults {patch['faults']}{last}"
            lines.append(f"  {patch['name']}: {patch['state']}: {patch['reason']}; {counts}")
    lines += [f"problem     {problem}" for problem in facts["problems"]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when something is wrong, 2 when the process can't be looked at."""
    parser = argparse.ArgumentParser("mlflashpoint doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pid", type=int, help="look at this running process")
    arguments = parser.parse_args(argv)
    try:
        facts = report(arguments.pid)
    except FlashpointError as error:
        sys.stderr.write(f"mlflashpoint: {error}\n")
        return 2
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if arguments.json else render(facts))
    return 1 if facts["problems"] else 0
