"""What the agent adds to the start of every Python process, off and on, with no framework imported.

``python -m benchmarks.startup [--json] [--pairs N]``. Each round runs ``python -c pass`` plain, off and on, in an
order that changes from round to round; the added time is the median of the rounds' differences, so that a slow
moment of a shared machine hits all three alike. Exit code 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from mlflashpoint.agent import bootstrap

LIMITS_MS = {"off": 5.0, "on": 10.0}


def arms() -> dict[str, dict[str, str]]:
    """The environment of each arm; what this process has of the agent's is left out."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLASHPOINT_", "PYTHON"))}
    with_path = {**plain, "PYTHONPATH": str(bootstrap.folder())}
    return {
        "plain": plain,
        "off": with_path,
        "on": {**with_path, "MLFLASHPOINT_ENABLED": "1", "MLFLASHPOINT_JOB_ID": "benchmark"},
    }


def start_once(env: dict[str, str], folder: str) -> float:
    """Seconds from starting an interpreter to its end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=env, cwd=folder, check=True)
    return time.perf_counter() - begin


def measure(pairs: int) -> dict[str, object]:
    """Milliseconds: the plain start, and what off and on add to it."""
    environments = arms()
    times: dict[str, list[float]] = {name: [] for name in environments}
    with tempfile.TemporaryDirectory() as folder:
        for env in environments.values():
            start_once(env, folder)  # writes the byte code caches
        for _ in range(pairs):
            for name in random.sample(list(environments), len(environments)):
                times[name].append(start_once(environments[name], folder) * 1e3)
    added = {
        name: statistics.median(one - plain for one, plain in zip(times[name], times["plain"], strict=True))
        for name in LIMITS_MS
    }
    return {
        "pairs": pairs,
        "plain_ms": round(statistics.median(times["plain"]), 2),
        "added_ms": {name: round(value, 2) for name, value in added.items()},
        "limit_ms": LIMITS_MS,
        "ok": all(added[name] <= limit for name, limit in LIMITS_MS.items()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=60)
    arguments = parser.parse_args()
    result = measure(arguments.pairs)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"python -c pass: {result['plain_ms']} ms, medians of {result['pairs']} interleaved rounds")
        for name, value in result["added_ms"].items():  # type: ignore[attr-defined]
            print(f"agent {name}: +{value} ms (at most {LIMITS_MS[name]} ms)")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
