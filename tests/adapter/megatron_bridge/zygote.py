"""A worker that imports Bridge once and forks a fresh process for every run that it is asked for.

Importing Bridge costs 15 s of processor time, a run of six steps one. ``torchrun`` starts one such worker per rank,
under the agent or not, as any training script. Every run is then a process of its own, with its own process group, that
can be killed for real. Talk is by files in a folder: ``run-<n>.json`` asks, ``run-<n>.pid.<rank>`` and
``run-<n>.exit.<rank>`` answer.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

_IDLE_S = 600


def serve(folder: Path) -> dict | None:
    """Answer requests until ``stop`` appears; returns in the forked child, with the request, to run it."""
    rank = os.environ["RANK"]
    owner = Path("/proc", os.environ["FLEET_OWNER"])
    number = 0
    last = time.monotonic()
    Path(folder, f"ready.{rank}").touch()
    while time.monotonic() - last < _IDLE_S and owner.exists():
        request = folder / f"run-{number}.json"
        if (folder / "stop").exists():
            return None
        if not request.exists():
            time.sleep(0.02)
            continue
        asked = json.loads(request.read_text())
        child = os.fork()
        if child == 0:
            log = os.open(folder / f"run-{number}.log.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            of_rank = asked.get("environ_of_rank", {}).get(rank, {})
            if rank in asked.get("file_limit_of_rank", {}):
                limit = asked["file_limit_of_rank"][rank]
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            os.environ.update(
                {**asked["environ"], **of_rank}, TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(asked["port"])
            )
            return asked
        temporary = folder / f"run-{number}.pid.{rank}.tmp"
        temporary.write_text(str(child))
        temporary.rename(folder / f"run-{number}.pid.{rank}")
        _, status = os.waitpid(child, 0)
        temporary.write_text(str(os.waitstatus_to_exitcode(status)))
        temporary.rename(folder / f"run-{number}.exit.{rank}")
        number += 1
        last = time.monotonic()
    return None


def main() -> None:
    # torchrun's own end must not leave runs behind
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Nothing that is imported is garbage: looking for it takes an eighth of the time.
    gc.disable()
    import bridge_on_cpu

    bridge_on_cpu.prepare()
    import torch

    torch.set_num_threads(1)
    bridge_on_cpu.settle()
    import megatron.bridge.training.gpt_step
    import megatron.bridge.training.pretrain  # noqa: F401
    from megatron.bridge.peft.lora import LoRA  # noqa: F401

    sys.path.insert(0, str(Path(__file__).parent))
    import train

    gc.freeze()
    gc.enable()
    request = serve(Path(sys.argv[1]))
    if request is None:
        return
    code = 1
    try:
        train.main(request)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    # As the interpreter ends, but for taking three million inherited objects apart, which takes it five seconds.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # a spawned writer of an asynchronous save, which asks for its CUDA device
    import bridge_on_cpu

    bridge_on_cpu.prepare()
