#!/usr/bin/env bash
# Overlays for the Lightning tests: .envs/lightning/<name>, one folder per release, put on PYTHONPATH before a
# Python 3.11 that has torch (the main environment). Idempotent: a stamp names what an overlay holds.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
folder=$root/.envs/lightning
# what Lightning needs beside torch, which the main environment brings
shared=("lightning-utilities>=0.11" "torchmetrics>=1.4,<2" "PyYAML>=6" "tqdm>=4.66" "fsspec>=2024.6" "packaging>=24" "typing-extensions>=4.9")

overlay() { # NAME REQUIREMENT...
    local name=$1
    shift
    local stamp="$folder/$name/.stamp" wanted="$*"
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    rm -rf "${folder:?}/$name"
    mkdir -p "$folder/$name"
    "$python" -m pip install --quiet --no-deps --target "$folder/$name" "$@"
    printf '%s' "$wanted" >"$stamp"
}

overlay lightning "lightning==2.6.6" "${shared[@]}"
overlay pytorch_lightning "pytorch-lightning==2.4.0" "${shared[@]}"
# the releases in between, for a whole kill and resume each
overlay lightning-2.5 "lightning==2.5.6" "${shared[@]}"
overlay pytorch_lightning-2.5 "pytorch-lightning==2.5.6" "${shared[@]}"
