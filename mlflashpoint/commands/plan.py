"""``mlflashpoint plan``: size the store and the save interval before a job starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import NoReturn

from mlflashpoint.errors import SettingError
from mlflashpoint.planning.quantity import parse_bytes, show_bytes, show_probability, show_seconds
from mlflashpoint.planning.sizing import Job, Sizing, size_up
from mlflashpoint.planning.survival import Loss

_STAGE_BANDWIDTH = "10GB/s"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"mlflashpoint plan: {message}\n")
        raise SystemExit(2)


def main(argv: list[str]) -> int:
    """Print the plan of a job as text, or as JSON with ``--json``; exit code 2 for bad input, in one line."""
    options = _parser().parse_args(argv)
    blocking = options.blocking_seconds
    if blocking is None:
        blocking = options.bytes_per_rank / options.stage_bandwidth
    job = Job(
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        bytes_per_rank=options.bytes_per_rank,
        tmpfs_bytes=options.tmpfs,
        replicas=options.replicas,
        node_mtbf_s=options.mtbf_hours * 3600,
        step_s=options.step_seconds,
        bandwidth=options.bandwidth,
        blocking_s=blocking,
        keep_versions=options.keep_versions,
        nodes_per_domain=options.nodes_per_domain,
        restart_s=options.restart_seconds,
        save_every_n_steps=options.save_every_n_steps,
        durable_every_n_steps=options.durable_every_n_steps,
    )
    try:
        sizing = size_up(job, failures=options.failures)
    except (ValueError, SettingError) as error:
        sys.stderr.write(f"mlflashpoint plan: {error}\n")
        return 2
    assumed = options.blocking_seconds is None
    sys.stdout.write(_as_json(job, sizing, assumed) if options.json else _as_text(job, sizing, assumed))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mlflashpoint plan",
        description="Size the store and the save interval before a job starts. Sizes are written like 80GiB, rates like"
        " 25GB/s or 200Gbit/s. docs/planning.md derives the formulas.",
    )
    add = parser.add_argument
    add("--nodes", type=_whole(1), required=True, metavar="N")
    add("--ranks-per-node", type=_whole(1), required=True, metavar="R")
    add("--bytes-per-rank", type=_size, required=True, metavar="B", help="size of one rank's shard")
    add("--tmpfs", type=_size, required=True, metavar="T", help="memory for the store on each node")
    add("--replicas", type=_whole(0), default=1, metavar="K", help="copies on other failure domains (1)")
    add("--mtbf-hours", type=_number, required=True, metavar="M", help="mean time between failures of ONE node")
    add("--step-seconds", type=_number, required=True, metavar="S", help="time of one training step")
    add("--bandwidth", type=_size, required=True, metavar="W", help="network rate of one node for replication")
    add("--save-every-n-steps", type=_whole(1), metavar="I", help="interval to judge; the recommended one by default")
    add("--durable-every-n-steps", type=_whole(1), metavar="D", help="interval of durable checkpoints")
    add("--blocking-seconds", type=_number, metavar="S", help="time that one save holds up training, if measured")
    add(
        "--stage-bandwidth",
        type=_size,
        default=parse_bytes(_STAGE_BANDWIDTH),
        metavar="W",
        help=f"rate at which a rank copies its shard into the store, to estimate that time ({_STAGE_BANDWIDTH})",
    )
    add("--restart-seconds", type=_zero_or_more, default=0.0, metavar="S", help="from a failure until steps run (0)")
    add("--keep-versions", type=_whole(1), default=2, metavar="V", help="as MLFLASHPOINT_KEEP_VERSIONS (2)")
    add("--nodes-per-domain", type=_whole(1), default=1, metavar="D", help="nodes that share a failure domain (1)")
    add("--failures", type=_whole(1), default=4, metavar="F", help="odds for up to F nodes failing together (4)")
    add("--json", action="store_true", help="machine-readable output, in bytes and seconds")
    return parser


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is below {minimum}")
        return number

    return parse


def _zero_or_more(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return number


def _number(text: str) -> float:
    number = _zero_or_more(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def _size(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _as_json(job: Job, sizing: Sizing, assumed: bool) -> str:
    plan = {"job": dataclasses.asdict(job), "plan": dataclasses.asdict(sizing), "blocking_assumed": assumed}
    return json.dumps(plan, indent=2, sort_keys=True) + "\n"


def _as_text(job: Job, sizing: Sizing, assumed: bool) -> str:
    share = sizing.memory_bytes / job.tmpfs_bytes
    rows = [
        ("job", f"{job.nodes} nodes x {job.ranks_per_node} ranks, {show_bytes(job.bytes_per_rank)} per rank"),
        ("replicas", f"{sizing.replicas} of {job.replicas} asked for"),
        (
            "memory per node",
            f"{show_bytes(sizing.memory_bytes)} of {show_bytes(job.tmpfs_bytes)} ({share:.0%}):"
            f" {'fits' if sizing.fits else 'DOES NOT FIT'}",
        ),
        ("a save holds up training", show_seconds(job.blocking_s) + (" (assumed)" if assumed else "")),
        (
            "replication",
            f"{show_seconds(sizing.replication_s)}, {sizing.replication_s / sizing.interval_s:.0%} of the interval",
        ),
        (
            "failures",
            f"one node every {show_seconds(job.node_mtbf_s)}, so one of the job's every"
            f" {show_seconds(sizing.job_mtbf_s)}",
        ),
        (
            "recommended interval",
            f"{sizing.recommended_steps} steps ({show_seconds(sizing.recommended_steps * job.step_s)};"
            f" Young/Daly {show_seconds(sizing.daly_s)})",
        ),
        ("interval", f"{sizing.interval_steps} steps, {show_seconds(sizing.interval_s)} from save to save"),
        ("lost per failure", f"{show_seconds(sizing.lost_s)} of work on average, from memory"),
    ]
    if sizing.lost_to_durable_s is not None:
        rows.append(("without memory", f"{show_seconds(sizing.lost_to_durable_s)} of work, from durable storage"))
    rows.append(("overhead", f"{sizing.overhead:.2%} of the time for saves, lost work and restarts"))
    rows += [(f"{_of(f, 'node')} at once", _odds(loss)) for f, loss in sizing.node_loss.items()]
    rows += [(f"{_of(f, 'failure domain')} at once", _odds(loss)) for f, loss in sizing.domain_loss.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join(lines + [f"warning: {warning}" for warning in sizing.warnings]) + "\n"


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _odds(loss: Loss) -> str:
    told = f"lose memory recovery with probability {show_probability(loss.probability)}"
    return told if not loss.standard_error else f"{told} (estimated, +- {show_probability(loss.standard_error)})"
