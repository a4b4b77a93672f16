#!/usr/bin/env bash
# Overlays for the Megatron-Core tests: .envs/megatron/<release>, one folder per release, put on PYTHONPATH before a
# Python 3.11 that has torch for the CPU (the main environment). The releases for Python 3.12 come from bridge.sh.
# Idempotent: a stamp names what an overlay holds.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
folder=$root/.envs/megatron
# what megatron-core imports beside torch; 0.15 breaks with numpy 2
shared=("numpy<2" einops packaging PyYAML tqdm regex six psutil)

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "megatron.sh: $python is no Python 3.11; name one that has torch in PYTHON" >&2
    exit 1
}

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

overlay 0.15.3 "megatron-core==0.15.3" "${shared[@]}"
overlay 0.16.1 "megatron-core==0.16.1" "${shared[@]}"
