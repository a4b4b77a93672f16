"""A launch command for the tests of ``mlflashpoint ab``: prints what a training job prints, and misbehaves on request.

Its environment: ``STALL_MS`` (length of a save), ``NOISE_MS``, ``FAIL`` (exit code), ``HANG`` (sleep before the end),
``ORPHAN`` (leave a process behind that notes its pid in this file), ``SHOW`` (variables to print),
``DEAF`` (ignore SIGINT and SIGTERM), ``SILENT`` (no timings).
"""

import os
import signal
import subprocess
import sys
import time
import zlib

for name in os.environ.get("SHOW", "").split():
    print(f"{name}={os.environ.get(name)}", flush=True)
if "DEAF" in os.environ:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
print(f"pid={os.getpid()}")
print("arguments:", *sys.argv[1:], flush=True)
if "ORPHAN" in os.environ:
    sleeper = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, lambda *_: None); time.sleep(600)"]
    child = subprocess.Popen(sleeper, start_new_session=True)
    with open(os.environ["ORPHAN"], "w") as file:
        file.write(str(child.pid))
stall = float(os.environ.get("STALL_MS", "100"))
run = "-".join(os.environ.get("MLFLASHPOINT_JOB_ID", "").split("-")[-2:])
for step in range(1, 1 if "SILENT" in os.environ else 6):
    # no two runs take equally long to the last digit
    jitter = zlib.crc32(f"{run} {step}".encode()) % 100 / 100
    milliseconds = stall + jitter + step * float(os.environ.get("NOISE_MS", "1"))
    print(f" iteration {step:8d}/       5 | consumed samples: {step:12d} |", flush=True)
    row = f"    save-checkpoint ................................: ({milliseconds - 0.5:.2f}, {milliseconds:.2f})"
    print(f"(min, max) time across ranks (ms):\n{row}", flush=True)
if "HANG" in os.environ:
    print("hanging", flush=True)
    time.sleep(float(os.environ["HANG"]))
sys.exit(int(os.environ.get("FAIL", "0")))
