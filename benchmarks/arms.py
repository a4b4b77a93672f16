"""A real A/B run: Megatron Bridge on two CPU ranks, with the arms of docs/checkpoint-timing-experiment.md.

    python -m benchmarks.arms [--mode replace|non_persistent] [--repeat 3] [--steps 25] [--output DIR]

Needs .envs/bridge (``make envs``). Durable checkpoints go to a folder on the disk that holds DIR, and are removed after
the run. The exit code is that of ``mlflashpoint ab``: 3 if the control invalidates the comparison.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from demo.__main__ import environment

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".envs" / "bridge" / "bin" / "python"
#: durable saves of a run: every 5 steps, as in the runbook
DURABLE = 5
CANDIDATES = {
    "replace": ("MODE=replace", "DURABLE_EVERY_N_SAVES=2"),
    "non_persistent": (),
}


def command(options: argparse.Namespace, durable: Path) -> list[str]:
    every = {"replace": 1000, "non_persistent": 2}[options.mode]
    candidate = [f"MLFLASHPOINT_BRIDGE_{setting}" for setting in CANDIDATES[options.mode]]
    arms = ["--arm", "baseline", "MLFLASHPOINT_BRIDGE_MODE=observe"]
    arms += ["--arm", "flashpoint", *candidate, f"MLFLASHPOINT_SAVE_EVERY_N_STEPS={every}"]
    compared = ["--repeat", str(options.repeat), "--skip-first", "1", "--output", str(options.output)]
    if options.mode == "replace":
        compared.append("--headline")
    training = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    training += ["--master-port", "29611", "demo/train.py", str(durable / "{run}"), str(durable / "{run}.record")]
    return [
        *(str(PYTHON), "-m", "mlflashpoint.cli", "ab", *compared, *arms),
        *("--", str(PYTHON), *training, str(options.steps), str(DURABLE)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arms", description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=sorted(CANDIDATES), default="replace")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--output", type=Path, help="new folder for logs and results; default: a temporary one")
    options = parser.parse_args()
    if not PYTHON.exists():
        sys.stderr.write("benchmarks.arms: .envs/bridge is missing; run make envs\n")
        return 2
    scratch = Path(tempfile.mkdtemp(prefix="mlflashpoint-arms-"))
    options.output = options.output or scratch / "results"
    own = {"DEMO_VERBOSE": "1", "PATH": os.environ["PATH"]}
    inherited = {name: value for name, value in environment().items() if not name.startswith("MLFLASHPOINT_")}
    try:
        durable = scratch / "durable"
        durable.mkdir()
        run = subprocess.run(
            command(options, durable),
            cwd=ROOT,
            env={**inherited, **own, "MLFLASHPOINT_REPLICAS": "0"},
            timeout=3600,
        )
        return run.returncode
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
