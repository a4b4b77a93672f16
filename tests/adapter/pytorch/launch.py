"""Starts the ranks of a job as real processes and collects what each of them says."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = int(os.environ.get("TEST_DEADLINE_S", 150))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(script, world_size, arguments, folder, *, env=None, python=sys.executable, wrapper=(), pythonpath=()):
    """Run ``script`` on ``world_size`` ranks; returns each rank's report, a dict.

    The report is the JSON that a rank writes to its file in ``REPORTS``; one that ends itself by SIGKILL has written it
    before.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        variables = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            **environment(pythonpath), "REPORTS": str(folder), **(env or {}),
        }  # fmt: skip
        log = (folder / f"log-{rank}.txt").open("ab")
        command = [*wrapper, str(python), str(script), *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True))
        log.close()
    give_up = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.wait(max(0.1, give_up - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"ranks hang\n{tail(folder, world_size)}") from None
    finally:
        for process in processes:
            with_group_gone(process)
    return reports_in(folder, script, world_size, tail(folder, world_size))


def fork(zygote, script, world_size, arguments, folder):
    """As ``launch``, from a warm process (tests/warm.py) that was started with ``environment()``."""
    folder.mkdir(parents=True)
    ours = {name: value for name, value in environment().items() if name.startswith("MLFLASHPOINT_")}
    outcome = zygote.run(
        [str(argument) for argument in arguments],
        ranks=world_size,
        environ={**ours, "REPORTS": str(folder)},
        deadline_s=DEADLINE_S,
        # A rank that kills itself leaves the others to themselves, as in launch.
        grace_s=DEADLINE_S,
        script=script,
    )
    assert not outcome.late, f"ranks hang\n{outcome.log}"
    return reports_in(folder, script, world_size, outcome.log)


def environment(pythonpath=()):
    """What every rank finds in its environment."""
    return {
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "MLFLASHPOINT_REPLICAS": "0",
        "MLFLASHPOINT_DEADLINE_S": "60", "PYTHONPATH": os.pathsep.join([*map(str, pythonpath), str(ROOT)]),
    }  # fmt: skip


def reports_in(folder, script, world_size, log):
    reports = [folder / f"report-{rank}.json" for rank in range(world_size)]
    missing = [rank for rank, report in enumerate(reports) if not report.exists()]
    assert not missing, f"ranks {missing} of {script} wrote no report\n{log}"
    return [json.loads(report.read_text()) for report in reports]


def with_group_gone(process):
    """End the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(folder, world_size):
    return "\n".join((Path(folder) / f"log-{rank}.txt").read_text()[-3000:] for rank in range(world_size))


def report(content):
    """For a rank: write its report, whole or not at all."""
    path = Path(os.environ["REPORTS"], f"report-{os.environ['RANK']}.json")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def scenarios(results):
    """For a rank: decorates a function that runs at once, and is reported by its name with what it gives or raises."""
    import torch.distributed as dist

    def scenario(run):
        try:
            results[run.__name__] = run()
        except BaseException:
            results[run.__name__] = {"error": traceback.format_exc()}
        report(results)
        dist.barrier()
        return run

    return scenario


def killed():
    """For a rank: wait for the end of its node."""
    Path(os.environ["REPORTS"], f"waiting-{os.environ['RANK']}").touch()
    while True:
        time.sleep(60)


def failing(run):
    """For a rank: what ``run`` fails with, by rank, and how many seconds it takes."""
    from torch.distributed.checkpoint import CheckpointException

    began = time.monotonic()
    failures = {}
    try:
        run()
    except CheckpointException as error:
        failures = {str(rank): [type(of).__name__, str(of)] for rank, (of, _) in error.failures.items()}
    return {"failures": failures, "seconds": time.monotonic() - began}
