"""The ``mlflashpoint`` command: a table of subcommands, each loaded only when it is asked for."""

from __future__ import annotations

import importlib
import signal
import sys

#: exit code of a command that Ctrl-C has ended, as a shell tells it
INTERRUPTED = 128 + signal.SIGINT

#: name -> (module with ``main(argv) -> int``, one line for ``--help``)
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("mlflashpoint.agent.doctor", "say whether the agent is on here, what it will patch, and why"),
    "install": ("mlflashpoint.agent.install", "make this Python environment load the agent without PYTHONPATH"),
    "uninstall": ("mlflashpoint.agent.uninstall", "undo install"),
    "status": ("mlflashpoint.commands.status", "list the versions that a base container holds"),
    "verify": ("mlflashpoint.commands.verify", "check every digest of the versions in a base container"),
    "clean": ("mlflashpoint.commands.clean", "remove a job's versions from memory"),
    "drain": ("mlflashpoint.commands.drain", "copy the newest complete version to a durable directory"),
    "plan": ("mlflashpoint.commands.plan", "size the store and the save interval before a job starts"),
    "timings": ("mlflashpoint.timings.command", "parse and compare checkpoint timings of training logs"),
    "ab": ("mlflashpoint.timings.ab", "run the arms of an A/B comparison from one launch command"),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    hint = "'mlflashpoint COMMAND --help' tells each one's arguments."
    return f"usage: mlflashpoint COMMAND [ARGUMENTS]\n\n{rows}\n\n{hint}\n"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code (2 for a usage error, 130 after Ctrl-C)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from mlflashpoint import __version__

        sys.stdout.write(f"mlflashpoint {__version__}\n")
        return 0
    if arguments[0] not in COMMANDS:
        sys.stderr.write(f"mlflashpoint: unknown command {arguments[0]!r}; known are {', '.join(COMMANDS)}\n")
        return 2
    # a command looks at a job from outside: the agent, if it came up here, stays out of it
    agent = sys.modules.get("mlflashpoint.agent.start")
    if agent is not None:
        agent.stop()
    try:
        module = importlib.import_module(COMMANDS[arguments[0]][0])
        return int(module.main(arguments[1:]))
    except KeyboardInterrupt:
        # whoever pressed it knows; a second one must not strike while the process ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
