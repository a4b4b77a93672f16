"""``mlflashpoint ab``: the arms of a comparison, one after the other, from one launch command."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mlflashpoint.errors import FlashpointError, TimingsError
from mlflashpoint.timings import arguments as shared
from mlflashpoint.timings import console
from mlflashpoint.timings.arms import Arm, Run, environment, plan, token
from mlflashpoint.timings.escapes import visible
from mlflashpoint.timings.experiment import Experiment, Outcome, is_reserved
from mlflashpoint.timings.signals import Interrupted, interruptible, rearm

#: all runs are planned, and their environments checked, before the first one starts
_MOST_REPEATS = 1000
_HELP = """\
Runs one launch command once per arm and repeat, each time with the arm's environment variables, keeps the logs apart,
and compares the checkpoint timings in them. The first arm is the baseline.

  mlflashpoint ab --arm baseline MLFLASHPOINT_BRIDGE_MODE=observe \\
      --arm flashpoint MLFLASHPOINT_SAVE_EVERY_N_STEPS=5 --repeat 3 -- torchrun --nproc-per-node 8 train.py

Every run inherits this environment, has the agent switched on (unless MLFLASHPOINT_ENABLED says otherwise), and gets
a job id and a memory container of its own (unless the arm sets MLFLASHPOINT_JOB_ID or MLFLASHPOINT_BASE_CONTAINER),
so no run resumes from what another one has left in memory. Durable checkpoints are the command's own business: if it
resumes from its save folder, give each run another one. {run}, {arm} and {repeat} in the command and in the arms'
values become baseline-r1, baseline and 1.

exit codes: 0 done; 1 a run failed or logged no timings, or a part of the comparison can't be made or shown;
2 an argument can't be used, and nothing was run; 3 done, and the comparison is invalid;
129, 130 or 143 interrupted, what was done is in the output folder.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    options, command = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    try:
        arguments = _parser().parse_args(options)
        arms = _arms(arguments.arm)
        runs = plan(arms, arguments.repeat)
        comparison = token()
        environments = [environment(run, os.environ, comparison) for run in runs]
        commands = [[run.filled(word) for word in command] for run in runs]
        _check_command(commands, environments)
        if arguments.dry_run:
            _show(runs, environments, commands)
            return 0
        folder = arguments.output or Path(f"mlflashpoint-{comparison}")
        experiment = Experiment(folder, arms, commands[0], shared.comparison_options(arguments))
    except FlashpointError as error:
        console.tell(f"mlflashpoint ab: {error}")
        return 2
    try:
        with interruptible():
            return _run_all(experiment, runs, environments, commands, arguments)
    except (FlashpointError, OSError) as error:
        # a disk that got full: the logs and results that are there are whole
        console.tell(f"mlflashpoint ab: {error}; logs and results so far are in {folder}")
        return 1
    except Interrupted as signal:
        # while the results were being written: each file is whole or missing
        console.tell(f"mlflashpoint ab: interrupted ({signal}); logs and results so far are in {folder}")
        return 128 + signal.number


def _run_all(
    experiment: Experiment,
    runs: Sequence[Run],
    environments: Sequence[dict[str, str]],
    commands: Sequence[list[str]],
    arguments: argparse.Namespace,
) -> int:
    code = 0
    for number, (run, environ, command) in enumerate(zip(runs, environments, commands, strict=True), start=1):
        title = f"[{number}/{len(runs)}] {run.name}"
        try:
            outcome = experiment.run(
                run,
                environ,
                command,
                title=title,
                deadline_s=arguments.deadline_s,
                grace_s=arguments.grace_s,
                keep_memory=arguments.keep_memory,
            )
        except Interrupted as signal:
            console.tell(f"mlflashpoint ab: interrupted ({signal}) in {run.name}; comparing what is done")
            code = 128 + signal.number
            rearm()
            break
        except (FlashpointError, OSError) as error:
            # a disk that got full: there is room on standard output still
            if not experiment.has_results:
                raise
            console.tell(f"mlflashpoint ab: {error} in {run.name}; comparing what is done")
            code = 1
            break
        if not outcome.done:
            code = 1
            _tell_failure(run, outcome)
            if not arguments.keep_going:
                left = len(runs) - number
                if left:
                    console.tell(f"mlflashpoint ab: the other {left} runs are left out (--keep-going runs them)")
                break
    verdict = experiment.conclude()
    return code or verdict


def _tell_failure(run: Run, outcome: Outcome) -> None:
    console.tell(f"mlflashpoint ab: {run.name} {outcome.how}; the end of {outcome.log}:")
    for line in outcome.last_lines():
        console.tell(f"  | {line}")


def _parser() -> shared.Parser:
    parser = shared.Parser(
        "mlflashpoint ab",
        usage="mlflashpoint ab --arm LABEL [NAME=VALUE ...] --arm LABEL [NAME=VALUE ...] [options] -- COMMAND ...",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--arm",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "NAME=VALUE"),
        help="an arm and the variables that only it has; at least two, the first is the baseline",
    )
    parser.add_argument(
        "--repeat",
        type=shared.whole(1, _MOST_REPEATS),
        default=1,
        action=shared.Once,
        metavar="N",
        help=f"runs of each arm, up to {_MOST_REPEATS}; every second round has the reverse order (default 1)",
    )
    parser.add_argument(
        "--output",
        type=shared.output_file,
        action=shared.Once,
        metavar="DIR",
        help="folder for logs and results, new or empty (default: mlflashpoint-ab<time> here)",
    )
    parser.add_argument("--keep-going", action="store_true", help="go on with the other runs after one has failed")
    parser.add_argument(
        "--keep-memory", action="store_true", help="leave the runs' memory containers on this node in place"
    )
    parser.add_argument(
        "--deadline-s",
        type=shared.number,
        default=86400.0,
        action=shared.Once,
        metavar="S",
        help="longest time that one run may take (default a day)",
    )
    parser.add_argument(
        "--grace-s",
        type=shared.number,
        default=8.0,
        action=shared.Once,
        metavar="S",
        help="time to stop after SIGINT, again after SIGTERM, and again for what is left behind (default 8: all of "
        "it fits into the 30 that Slurm and Kubernetes give)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the runs without running them")
    shared.add_comparison(parser)
    return parser


def _arms(given: Sequence[Sequence[str]]) -> list[Arm]:
    arms = []
    for words in given:
        try:
            arms.append(Arm.parse(words))
        except argparse.ArgumentTypeError as error:
            raise TimingsError(str(error)) from None
    labels = [arm.label for arm in arms]
    if len(arms) < 2:
        raise TimingsError("a comparison needs two arms", remedy="give --arm LABEL [NAME=VALUE ...] twice")
    for label in labels:
        if is_reserved(label):
            raise TimingsError(
                f"{label!r} is the name of a file of mlflashpoint ab", remedy="give the arm another label"
            )
        # file systems exist that take the two for the same file
        if [other.casefold() for other in labels].count(label.casefold()) > 1:
            raise TimingsError(f"the label {label!r} is used twice", remedy="give each arm a label of its own")
    return arms


def _check_command(commands: Sequence[list[str]], environments: Sequence[dict[str, str]]) -> None:
    for command, environ in zip(commands, environments, strict=True):
        if not command:
            raise TimingsError("no launch command", remedy="put it behind '--' at the end")
        program, path = command[0], environ.get("PATH")
        if shutil.which(program, path=path) is not None:
            continue
        if os.sep in program and os.path.isdir(program):
            raise TimingsError(f"the command {program!r} is a folder")
        if shutil.which(program, mode=os.F_OK, path=path) is not None:
            raise TimingsError(
                f"the command {program!r} is not executable", remedy="chmod +x, or put its interpreter before it"
            )
        raise TimingsError(f"the command {program!r} is not found")


def _show(runs: Sequence[Run], environments: Sequence[dict[str, str]], commands: Sequence[list[str]]) -> None:
    for run, environ, command in zip(runs, environments, commands, strict=True):
        changed = {name: value for name, value in sorted(environ.items()) if os.environ.get(name) != value}
        words = [f"{name}={shlex.quote(value)}" for name, value in changed.items()]
        console.show(f"# {run.name}\n{visible(' '.join(words) + ' ' + shlex.join(command))}\n")


if __name__ == "__main__":
    sys.exit(main())
