#!/usr/bin/env bash
# Build .envs/bridge (Python 3.12, torch, what Megatron Bridge imports) and, beside it, one folder per Bridge version
# in .envs/bridge-overlays/<version>, to be put on PYTHONPATH. Does nothing when that was built by this same script.
# Usage: tools/envs/bridge.sh [VERSION ...]      default: every version below
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
env=$root/.envs/bridge
overlays=$root/.envs/bridge-overlays

# Bridge version -> megatron-core, nvidia-resiliency-ext
declare -A core=([0.4.2]=0.17.1 [0.5.1]=0.18.2 [0.6.2]=0.19.2)
declare -A nvrx=([0.4.2]=0.6.0 [0.5.1]=0.6.0 [0.6.2]=0.6.0)
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.4.2 0.5.1 0.6.2)

stamp=$(cat "$here/bridge.sh" "$here/bridge.lock" | sha256sum | cut -d' ' -f1)
stamped() { [ "$(cat "$1/.stamp" 2>/dev/null)" = "$stamp" ]; }
pip() { "$env/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# Two builds at once in one tree would tread on each other.
mkdir -p "$root/.envs"
exec 9>"$root/.envs/.bridge.lock"
flock 9

if ! stamped "$env"; then
    python=$("$here/../find_python.sh" 3.12)
    "$env/bin/python" -I -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || {
        rm -rf "$env"
        "$python" -m venv "$env"
    }
    echo "building $env ..." >&2
    pip install -c "$here/bridge.lock" torch numpy
    pip install -c "$here/bridge.lock" "setuptools<82" packaging einops omegaconf pyyaml tqdm rich regex six psutil \
        "transformers>=5.8,<=5.12.1" "hydra-core>=1.3.2,<1.4" pulp scipy pydantic datasets requests tensorboard \
        defusedxml nvidia-ml-py megatron-energon wrapt xxhash pytest
    pip install -c "$here/bridge.lock" --no-deps nvidia-modelopt
    echo "$stamp" >"$env/.stamp"
fi

for version in "${versions[@]}"; do
    [ -n "${core[$version]:-}" ] || { echo "unknown Megatron Bridge version $version; known: ${!core[*]}" >&2; exit 2; }
    target=$overlays/$version
    stamped "$target" && continue
    echo "building $target ..." >&2
    rm -rf "$target" "$target.new"
    # The platform tags are given by hand: nvidia-resiliency-ext's wheels ask for glibc 2.39, and what Bridge uses of them runs on 2.36.
    pip install --no-deps --target "$target.new" --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none --platform manylinux_2_39_x86_64 --platform manylinux_2_31_x86_64 \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
        "megatron-bridge==$version" "megatron-core==${core[$version]}" "nvidia-resiliency-ext==${nvrx[$version]}"
    echo "$stamp" >"$target.new/.stamp"
    mv "$target.new" "$target"
done
