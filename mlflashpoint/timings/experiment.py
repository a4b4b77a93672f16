"""The output folder of ``mlflashpoint ab``: a log per run, what became of each, and the results once there are some.

``runs.json`` is rewritten before and after every run, each log is closed with its run: whenever the command ends,
``mlflashpoint timings parse`` can be used on what is there.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.errors import SettingError, TimingsError
from mlflashpoint.settings import StoreConfig
from mlflashpoint.timings import document, markdown, page, prefix, text
from mlflashpoint.timings.arms import Arm, Run
from mlflashpoint.timings.compare import compare
from mlflashpoint.timings.lines import LineSplitter, chunks
from mlflashpoint.timings.output import write_whole
from mlflashpoint.timings.parser import parse
from mlflashpoint.timings.processes import Ending
from mlflashpoint.timings.processes import run as run_command
from mlflashpoint.timings.progress import Progress
from mlflashpoint.timings.samples import TimingSet
from mlflashpoint.timings.signals import Interrupted

DONE, RUNNING, FAILED, INTERRUPTED = "done", "running", "failed", "interrupted"


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
                    how, done = _words(ending)
                except OSError as error:
                    how, done, ending = f"can't be started: {error.strerror or error}", False, Ending(127, 0.0)
                except Interrupted:
                    record["state"] = INTERRUPTED
                    self._save_records()
                    progress.end("interrupted")
                    raise
                finally:
                    if not keep_memory:
                        _forget(run, environ)
                progress.end(f"{how} after {ending.seconds:.1f}s")
        record |= {"state": DONE if done else FAILED, "exit_code": ending.code, "seconds": round(ending.seconds, 3)}
        self._save_records()
        if done:
            self._done[run.arm.label].append(str(path))
        return Outcome(done, how, path)

    def conclude(self) -> int:
        """Parse and compare what is done; returns 0, 1 if an arm has no timings, 3 if a control says invalid."""
        code = 0
        sets: dict[str, TimingSet] = {}
        for arm in self._arms:
            if not self._done[arm.label]:
                sys.stderr.write(f"mlflashpoint ab: no run of {arm.label} is done: nothing to compare it by\n")
                continue
            try:
                sets[arm.label] = parse(arm.label, self._done[arm.label])
                write_whole(self.folder / f"{arm.label}.json", sets[arm.label].to_json())
            except TimingsError as error:
                sys.stderr.write(f"mlflashpoint ab: {arm.label}: {error}\n")
                code = 1
        baseline, *others = self._arms
        for other in others:
            if baseline.label in sets and other.label in sets:
                try:
                    code = self._compare(sets[baseline.label], sets[other.label]) or code
                except TimingsError as error:
                    sys.stderr.write(f"mlflashpoint ab: {other.label}: {error}\n")
                    code = 1
        sys.stderr.write(f"mlflashpoint ab: logs and results are in {self.folder}\n")
        return code

    def _compare(self, baseline: TimingSet, candidate: TimingSet) -> int:
        comparison = compare(baseline, candidate, **self._options)
        for kind, module in (("json", document), ("md", markdown), ("html", page)):
            write_whole(self.folder / f"report-{candidate.label}.{kind}", module.render(comparison))
        sys.stdout.write(text.render(comparison) + "\n")
        sys.stdout.flush()
        return 3 if comparison.invalid else 0

    def _save_records(self) -> None:
        content = {"command": self._command, "arms": [arm.label for arm in self._arms], "runs": self._records}
        write_whole(self.folder / "runs.json", json.dumps(content, indent=1) + "\n")


def _words(ending: Ending) -> tuple[str, bool]:
    if ending.timed_out:
        return f"was stopped at its deadline after {ending.seconds:.0f}s", False
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
            shutil.rmtree(config.base_container, ignore_errors=True)
