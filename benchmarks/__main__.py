"""Every benchmark, one after the other: ``python -m benchmarks [NAME ...]``.

Nothing else should run on the machine meanwhile. The exit code is 1 if a benchmark failed or missed a target.
"""

from __future__ import annotations

import subprocess
import sys

NAMES = ("save", "startup", "dcp", "lightning", "replication", "replicated_save", "simulation", "arms")


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        sys.stderr.write(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}\n")
        return 2
    bad = []
    for name in names or NAMES:
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            bad.append(name)
    sys.stdout.write(f"\nfailed, or missed a target: {', '.join(bad) or 'none'}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
