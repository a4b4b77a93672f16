"""``mlflashpoint timings parse`` and ``mlflashpoint timings compare``.

Exit codes: 0 done; 2 an argument, a log or a result file can't be used (one line on standard error, no output
written); 3 the comparison was made and printed, and is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings import arguments as shared
from mlflashpoint.timings import console, document, markdown, page, text
from mlflashpoint.timings.compare import compare
from mlflashpoint.timings.output import check_writable, write_whole
from mlflashpoint.timings.parser import parse
from mlflashpoint.timings.samples import TimingSet

INVALID = 3

_PARSE_HELP = """\
Reads training logs and keeps one sample per save: the time of the slowest rank, in the unit that the log names.

Understood are the timer blocks of Megatron-LM and Megatron Bridge (all of --timing-log-option), NeMo's 'Global
Checkpoint Save' lines, the step tables of NeMo RL, and mlflashpoint's own records; with the prefixes of Slurm,
Kubernetes, Ray and torchrun, plain or gzip, '-' for standard input. The same save logged twice counts once.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        arguments = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
        code: int = arguments.run(arguments)
        return code
    except TimingsError as error:
        console.tell(f"mlflashpoint timings: {error}")
        return 2


def _parser() -> shared.Parser:
    parser = shared.Parser("mlflashpoint timings", description="Checkpoint timings out of training logs.")
    commands = parser.add_subparsers(required=True, metavar="parse|compare")
    reading = commands.add_parser(
        "parse",
        help="logs of one label to a file of samples",
        description=_PARSE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reading.add_argument("logs", nargs="+", metavar="LOG", help="log file, plain or gzip; - for standard input")
    reading.add_argument("--label", type=shared.label, required=True, action=shared.Once, help="name of the arm")
    _add_output(reading, "samples go")
    reading.add_argument(
        "--timer",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep timers that match (shell pattern, can stand several times); default: all of checkpoints",
    )
    reading.add_argument(
        "--skip-empty", action="store_true", help="pass over logs without timings, as most ranks' own logs are"
    )
    reading.set_defaults(run=_parse)
    comparing = commands.add_parser("compare", help="two files of samples against each other")
    for side in ("baseline", "candidate"):
        comparing.add_argument(
            f"--{side}",
            type=Path,
            required=True,
            action=shared.Once,
            metavar="FILE",
            help="what timings parse wrote; - for standard input",
        )
    shared.add_comparison(comparing)
    form = comparing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="print Markdown instead of a table")
    _add_output(comparing, "table goes")
    comparing.add_argument(
        "--html", type=shared.output_file, action=shared.Once, metavar="FILE", help="write a report as one page"
    )
    comparing.set_defaults(run=_compare)
    return parser


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--output",
        type=shared.output,
        action=shared.Once,
        metavar="FILE",
        help=f"where the {what}; - for standard output, the default",
    )


def _parse(arguments: argparse.Namespace) -> int:
    output: Path | None = arguments.output
    shared.different_files([output, *(Path(log) for log in arguments.logs if output is not None and log != "-")])
    if output is not None:
        check_writable(output)
    timings = parse(arguments.label, arguments.logs, timers=arguments.timer, skip_empty=arguments.skip_empty)
    _put(output, timings.to_json())
    for note in timings.notes:
        console.tell(f"mlflashpoint timings: note: {note}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    outputs = [path for path in (arguments.output, arguments.html) if path is not None]
    shared.different_files([arguments.baseline, arguments.candidate, *outputs])
    for path in outputs:
        check_writable(path)
    comparison = compare(
        TimingSet.read(arguments.baseline),
        TimingSet.read(arguments.candidate),
        **shared.comparison_options(arguments),
    )
    render = document.render if arguments.json else markdown.render if arguments.markdown else text.render
    shown = render(comparison)
    if arguments.html is not None:
        write_whole(arguments.html, page.render(comparison))
    _put(arguments.output, shown)
    return INVALID if comparison.invalid else 0


def _put(output: Path | None, content: str) -> None:
    if output is not None:
        write_whole(output, content)
        return
    console.show(content)


if __name__ == "__main__":
    sys.exit(main())
