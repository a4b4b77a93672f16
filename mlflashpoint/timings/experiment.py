"""The output folder of ``mlflashpoint ab``: a log per run, what became of each, and the results once there are some.

``runs.json`` is rewritten before and after every run, each log is closed with its run: whenever the command ends,
``mlflashpoint timings parse`` can be used on what is there.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.errors import ComparisonOptionError, SettingError, TimingsError
from mlflashpoint.settings import StoreConfig
from mlflashpoint.timings import console, document, markdown, page, prefix, text
from mlflashpoint.timings.arguments import as_arguments
from mlflashpoint.timings.arms import Arm, Run
from mlflashpoint.timings.compare import Comparison, compare
from mlflashpoint.timings.lines import LineSplitter, chunks
from mlflashpoint.timings.output import write_whole
from mlflashpoint.timings.parser import parse
from mlflashpoint.timings.processes import Ending
from mlflashpoint.timings.processes import run as run_command
from mlflashpoint.timings.progress import Progress
from mlflashpoint.timings.samples import TimingSet
from mlflashpoint.timings.signals import Interrupted

DONE, RUNNING, FAILED, INTERRUPTED = "done", "running", "failed", "interrupted"


def is_reserved(label: str) -> bool:
    """Whether an arm of that label would write over, or be taken for, another file of the folder."""
    name = label.casefold()
    return name in ("runs", "logs") or name.startswith("report-")


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        how: ``done``, or a few words on how it failed.
        log: its log.
    """

    done: bool
    how: str
    log: Path

    def last_lines(self, count: int = 8) -> list[str]:
        """The end of the log, readable on a terminal."""
        lines: deque[bytes] = deque(maxlen=count)
        splitter = LineSplitter()
        for chunk in chunks(str(self.log)):
            lines.extend(splitter.feed(chunk))
        lines.extend(splitter.finish())
        return [prefix.strip(line).text[:300] for line in lines]


class Experiment:
    """One comparison in its folder.

    Args:
        folder: new or empty.
        arms: the arms, the baseline first.
        command: the launch command, for the record.
        options: keywords of ``compare``.

    Raises:
        TimingsError: the folder is not empty, or can't be made.
    """

    def __init__(self, folder: Path, arms: Sequence[Arm], command: Sequence[str], options: Mapping[str, Any]) -> None:
        self.folder = folder
        self._arms = list(arms)
        self._command = list(command)
        self._options = dict(options)
        self._records: list[dict[str, Any]] = []
        self._stale = False
        self._done: dict[str, list[str]] = {arm.label: [] for arm in arms}
        try:
            if folder.exists() and any(folder.iterdir()):
                raise TimingsError("the output folder is not empty", path=folder, remedy="give --output a new one")
            (folder / "logs").mkdir(parents=True)
        except OSError as error:
            raise TimingsError(f"can't make the output folder: {error.strerror or error}", path=folder) from None

    def run(
        self,
        run: Run,
        environ: Mapping[str, str],
        command: Sequence[str],
        *,
        title: str,
        deadline_s: float,
        grace_s: float,
        keep_memory: bool = False,
    ) -> Outcome:
        """Run once; raises Interrupted after having noted it."""
        path = self.folder / "logs" / f"{run.name}.log"
        record: dict[str, Any] = {
            "run": run.name,
            "arm": run.arm.label,
            "repeat": run.repeat,
            "state": RUNNING,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "log": str(path.relative_to(self.folder)),
            "settings": dict(run.arm.settings),
            "command": list(command),
        }
        self._records.append(record)
        self._save_records()
        with open(path, "ab") as log:
            told = {"arm": run.arm.label, "run": environ.get("MLFLASHPOINT_JOB_ID"), "settings": dict(run.arm.settings)}
            log.write(f"mlflashpoint ab {json.dumps(told, sort_keys=True)}\n".encode())
            log.flush()
            with contextlib.closing(Progress(title, path)) as progress:
                try:
                    ending = run_command(
                        command, environ, log, deadline_s=deadline_s, grace_s=grace_s, watch=progress.watch
                    )
                    how, done = _words(ending, deadline_s)
                except OSError as error:
                    how, done, ending = f"can't be started: {error.strerror or error}", False, Ending(127, 0.0)
                except Interrupted:
                    record["state"] = INTERRUPTED
                    with contextlib.suppress(TimingsError):
                        self._save_records()
                    progress.end("interrupted")
                    self._tell_left_out(run, path, progress.timings)
                    raise
                finally:
                    if not keep_memory:
                        _forget(run, environ)
                progress.end(how if ending.timed_out else f"{how} after {ending.seconds:.1f}s")
                if not done:
                    self._tell_left_out(run, path, progress.timings)
        record |= {"state": DONE if done else FAILED, "exit_code": ending.code, "seconds": round(ending.seconds, 3)}
        if done:
            self._done[run.arm.label].append(str(path))
        self._save_records()
        return Outcome(done, how, path)

    def _tell_left_out(self, run: Run, log: Path, timings: int) -> None:
        if timings:
            command = shlex.join(("mlflashpoint", "timings", "parse", "--label", run.arm.label, str(log)))
            console.tell(f"mlflashpoint ab: {run.name} is left out; to use the {timings} timings in its log: {command}")

    @property
    def has_results(self) -> bool:
        """Whether there is something to compare."""
        baseline, *others = self._done.values()
        return bool(baseline) and any(others)

    def conclude(self) -> int:
        """Parse and compare what is done.

        Returns 0, 1 if a run has no timings or a part of the comparison can't be made, 3 if a control says invalid.
        """
        code = 0
        sets: dict[str, TimingSet] = {}
        for arm in self._arms:
            logs = self._done[arm.label]
            if not logs:
                console.tell(f"mlflashpoint ab: no run of {arm.label} is done: nothing to compare it by")
                continue
            try:
                timings = parse(arm.label, logs, skip_empty=True)
            except TimingsError as error:
                console.tell(f"mlflashpoint ab: {arm.label}: {error}")
                code = 1
                continue
            sets[arm.label] = timings
            code = code if self._written(f"{arm.label}.json", timings.to_json()) else 1
            for log in set(logs) - {source.path for source in timings.sources}:
                reason = next((note for note in timings.notes if note.startswith(f"{log}: ")), log)
                console.tell(f"mlflashpoint ab: {arm.label}: {reason}; the other runs are compared")
                code = 1
        baseline, *others = self._arms
        shown, invalid = [], False
        for other in others:
            if baseline.label in sets and other.label in sets:
                try:
                    comparison, whole = self._compared(sets[baseline.label], sets[other.label])
                    shown.append(text.render(comparison) + "\n")
                    invalid = invalid or bool(comparison.invalid)
                    code = code if whole else 1
                    for kind, module in (("json", document), ("md", markdown), ("html", page)):
                        if not self._written(f"report-{other.label}.{kind}", module.render(comparison)):
                            code = 1
                except TimingsError as error:
                    console.tell(f"mlflashpoint ab: {other.label}: {error}")
                    code = 1
        # last of all: nothing that becomes of standard output can take a report away
        try:
            if shown:
                console.show("".join(shown))
        except TimingsError as error:
            console.tell(f"mlflashpoint ab: {error}")
            code = 1
        if self._stale:
            code = 1
            for record in self._records:
                record["state"] = FAILED if record["state"] == RUNNING else record["state"]
            # what was in the way may be gone by now
            if not self._written("runs.json", self._told_records()):
                console.tell(f"mlflashpoint ab: {self.folder / 'runs.json'} does not tell of the last run's end")
        console.tell(f"mlflashpoint ab: logs and results are in {self.folder}")
        return code or (3 if invalid else 0)

    def _written(self, name: str, content: str) -> bool:
        """Write a result; one that can't be written costs that file alone."""
        try:
            write_whole(self.folder / name, content)
        except TimingsError as error:
            console.tell(f"mlflashpoint ab: {error}")
            return False
        return True

    def _compared(self, baseline: TimingSet, candidate: TimingSet) -> tuple[Comparison, bool]:
        """The comparison, if need be without the options that can't be followed; and whether none was left out."""
        options, whole = dict(self._options), True
        while True:
            try:
                return compare(baseline, candidate, **options), whole
            except ComparisonOptionError as error:
                if error.option not in options:
                    raise
                console.tell(f"mlflashpoint ab: {candidate.label}: {error}")
                del options[error.option]
                whole = False
                files = (self.folder / f"{label}.json" for label in (baseline.label, candidate.label))
                rest = "".join(f" {shlex.quote(word)}" for word in as_arguments(options))
                one, other = (shlex.quote(str(path)) for path in files)
                console.tell(
                    f"mlflashpoint ab: {candidate.label}: compared without; again with other options: "
                    f"mlflashpoint timings compare --baseline {one} --candidate {other}{rest}"
                )

    def _save_records(self) -> None:
        self._stale = True
        write_whole(self.folder / "runs.json", self._told_records())
        self._stale = False

    def _told_records(self) -> str:
        content = {"command": self._command, "arms": [arm.label for arm in self._arms], "runs": self._records}
        return json.dumps(content, indent=1) + "\n"


def _words(ending: Ending, deadline_s: float) -> tuple[str, bool]:
    if ending.timed_out:
        return f"was stopped at its deadline of {deadline_s:g}s", False
    left = f" ({ending.leftovers} processes it left behind were stopped)" if ending.leftovers else ""
    if ending.code == 0:
        return f"done{left}", True
    if ending.code < 0:
        return f"failed: killed by signal {-ending.code}{left}", False
    return f"failed: exit code {ending.code}{left}", False


def _forget(run: Run, environ: Mapping[str, str]) -> None:
    """Give back the memory of a run on this node, or the next ones would find less of it."""
    if "MLFLASHPOINT_JOB_ID" in run.arm.settings or "MLFLASHPOINT_BASE_CONTAINER" in run.arm.settings:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, SettingError):
        config = StoreConfig.from_env(environ)
        identity = json.loads((config.base_container / "container.json").read_text())
        if identity.get("job_id") == config.job_id:
            # Reading logs alone needs no store.
            from mlflashpoint.core import belongings

            belongings.remove(config.base_container)
