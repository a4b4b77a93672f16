"""Logs of one label to a ``TimingSet``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.copies import ToldSaves
from mlflashpoint.timings.lines import LineSplitter, chunks
from mlflashpoint.timings.runs import Lost, run_samples
from mlflashpoint.timings.samples import Sample, Source, TimingSet
from mlflashpoint.timings.scan import WORDS, JobFacts, LogScan, TimerChoice

_LOOKED_FOR = "timer blocks of Megatron, checkpoint lines of NeMo or NeMo RL, 'mlflashpoint save' records"


def parse(label: str, paths: Sequence[str], *, timers: Iterable[str] = (), skip_empty: bool = False) -> TimingSet:
    """Read all ``paths`` (``-`` is standard input) as logs of one label.

    Several files are several runs, unless they complete each other: files that hold different ranks of the same saves
    are one run.

    Args:
        label: name of the arm.
        paths: the log files.
        timers: shell patterns of timer names to keep, empty for all that have to do with checkpoints.
        skip_empty: pass over files without timings, instead of refusing them.

    Raises:
        TimingsError: a file can't be read, is empty, holds no timings, is of another job than the rest, or repeats
            what another one holds.
    """
    _no_file_twice(paths)
    scans: list[tuple[str, LogScan]] = []
    told: list[ToldSaves] = []
    sources, notes = [], []
    for path in paths:
        scan, splitter, digest = _scan(path, TimerChoice(timers))
        if not scan.samples:
            empty = _no_timings(path, scan, splitter.lines, len(paths) > 1)
            if not skip_empty:
                raise empty
            notes.append(f"{path}: {empty.message}")
            continue
        told.append(ToldSaves(path, scan, digest))
        for (other_path, other), others in zip(scans, told, strict=False):
            _same_job(label, other_path, other.facts, path, scan.facts)
            notes += others.repeats(told[-1])
        scans.append((path, scan))
        sources.append(
            Source(path, splitter.lines, scan.samples, scan.duplicates, scan.torn, splitter.overlong, scan.collapsed)
        )
    if not scans:
        raise TimingsError(
            f"none of the logs of {label!r} holds a checkpoint timing: {'; '.join(notes)}",
            remedy=f"needed: {_LOOKED_FOR}",
        )
    return _together(label, scans, tuple(sources), notes)


def _scan(path: str, choice: TimerChoice) -> tuple[LogScan, LineSplitter, bytes]:
    scan, splitter, digest = LogScan(choice), LineSplitter(WORDS), hashlib.blake2b()
    for chunk in chunks(path):
        digest.update(chunk)
        scan.feed(splitter.feed(chunk))
    scan.feed(splitter.finish())
    scan.finish()
    return scan, splitter, digest.digest()


def _no_timings(path: str, scan: LogScan, lines: int, several: bool) -> TimingsError:
    if not lines:
        message = "the log is empty"
    else:
        message = f"no checkpoint timing in {lines} lines"
        if scan.torn:
            message += f", and {scan.torn} torn ones"
    remedy = f"needed: {_LOOKED_FOR}"
    if scan.facts.resumed_from:
        message += f"; the job resumed from step {scan.facts.resumed_from[-1]}"
        remedy = "start each run from the same point, with a save folder of its own"
    elif scan.choice.refused:
        message += f" of a timer that matches {_words(map(repr, scan.choice.patterns))}"
        remedy = f"name one of those that it has: {_words(scan.choice.refused)}"
    elif scan.unread:
        message += f"; {scan.unread} lines hold timer blocks in a form that is not understood"
        remedy = "give the log as the job wrote it, each line of its text on a line"
    elif scan.facts.saves_told:
        message += f"; the log tells of {scan.facts.saves_told} saves, but not how long they took"
        remedy = "set logger.logging_level to 20 (INFO) and logger.timing_log_level to 0 or more"
    if several:
        remedy += "; --skip-empty passes over files of ranks that log none"
    return TimingsError(message, path=path, remedy=remedy)


def _no_file_twice(paths: Sequence[str]) -> None:
    seen: dict[object, str] = {}
    for path in paths:
        key: object = path
        if path != "-" and os.path.exists(path):
            status = os.stat(path)
            key = (status.st_dev, status.st_ino)
        if key in seen:
            raise TimingsError("the same log is given twice", path=path)
        seen[key] = path


def _same_job(label: str, one_path: str, one: JobFacts, other_path: str, other: JobFacts) -> None:
    for what, mine, theirs in (
        ("framework", one.frameworks, other.frameworks),
        ("parameters on the first model-parallel rank", one.parameters, other.parameters),
        ("world size", one.world_size, other.world_size),
        ("arm", one.arms, other.arms),
    ):
        # files of other ranks than the last need not tell; a job with several models names them all
        if mine and theirs and mine.isdisjoint(theirs):
            raise TimingsError(
                f"logs of different jobs under the label {label!r}: {what} {_words(mine)} in {one_path}, "
                f"{_words(theirs)} in {other_path}",
                remedy="parse them under two labels",
            )


def _words(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))


def _together(label: str, scans: list[tuple[str, LogScan]], sources: tuple[Source, ...], notes: list[str]) -> TimingSet:
    runs: list[tuple[str, LogScan]] = []
    for path, scan in scans:
        partner = next((run for _, run in runs if run.ranked.completes(scan.ranked)), None)
        if partner is None:
            runs.append((path, scan))
        else:
            partner.ranked.absorb(scan.ranked)
            partner.block_saves += scan.block_saves
    notes += [
        f"{path} and {other_path} hold different ranks of the same steps, but their saves began at other times: "
        "they count as two runs, of which not all ranks' times are known"
        for (path, run), (other_path, other) in combinations(runs, 2)
        if run.ranked.contradicts(other.ranked)
    ]
    timers: dict[str, list[Sample]] = {}
    lost = Lost()
    first = 0
    for path, run in runs:
        found = run_samples(run, {size for _, scan in scans for size in scan.facts.world_size}, lost)
        attempts = sorted({sample.run for _, sample in found})
        if len(attempts) > 1:
            notes.append(
                f"{path}: the job started over; each of its {len(attempts)} starts with saves is a run of its own"
            )
        for timer, sample in found:
            timers.setdefault(timer, []).append(replace(sample, run=first + attempts.index(sample.run)))
        first += max(1, len(attempts))
    if not timers:
        if lost.partial:
            raise TimingsError(
                f"of no save of {label!r} the maximum across ranks is known",
                remedy="each log lacks timings of some ranks, or holds torn ones: give the logs of all ranks, whole",
            )
        raise TimingsError(
            f"no save of {label!r} went well on all ranks", remedy='the log says why: look for "ok": false'
        )
    for samples in timers.values():
        samples.sort(key=lambda sample: (sample.run, sample.order))
    facts = [scan.facts for _, scan in scans]
    return TimingSet(
        label=label,
        timers={timer: tuple(samples) for timer, samples in sorted(timers.items())},
        job={
            "frameworks": sorted({name for fact in facts for name in fact.frameworks}),
            "parameters": sorted({count for fact in facts for count in fact.parameters}),
            "world_size": sorted({size for fact in facts for size in fact.world_size}),
        },
        failed=lost.failed,
        skipped=lost.skipped,
        sources=sources,
        notes=(*notes, *_totals(scans), *_notes(scans), *lost.notes()),
    )


def _totals(scans: list[tuple[str, LogScan]]) -> list[str]:
    """A job can be prolonged, so that another length is no proof of another job."""
    first: dict[int, str] = {}
    for path, scan in scans:
        if scan.total_steps is not None:
            first.setdefault(scan.total_steps, path)
    if len(first) < 2:
        return []
    lengths = ", ".join(f"{total} steps in {path}" for total, path in first.items())
    return [f"the logs are of trainings of different lengths: {lengths}; parse different jobs under different labels"]


def _notes(scans: list[tuple[str, LogScan]]) -> list[str]:
    notes = []
    for path, scan in scans:
        if scan.collapsed:
            notes.append(
                f"{path}: Ray left {scan.collapsed} save records out (their maximum across ranks is not known); "
                "run with RAY_DEDUP_LOGS=0"
            )
        if scan.torn:
            notes.append(f"{path}: {scan.torn} torn pieces of timings were left out")
        for step in scan.facts.resumed_from:
            notes.append(f"{path}: the job resumed from a checkpoint of step {step}")
    return notes
