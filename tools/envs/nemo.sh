#!/usr/bin/env bash
# The environment of the NeMo 2.0 tests: .envs/nemo, Python 3.11, NeMo 2.7.3 with megatron-core 0.15.3 and
# Lightning 2.4.0, torch for the CPU. Idempotent: a stamp names what it holds.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
env=$root/.envs/nemo
resolved=(
    "torch==2.13.0" "numpy<2" "lightning==2.4.0" "fsspec==2024.12.0" "hydra-core==1.3.2" "omegaconf<=2.3"
    fiddle cloudpickle einops wrapt xxhash "ruamel.yaml" tensorboard python-dateutil huggingface_hub wget
    text-unidecode onnx "protobuf~=5.29.5" transformers sentencepiece "pandas<3" scikit-learn peft
    "nv_one_logger_core>=2.3.1" "nv_one_logger_training_telemetry>=2.3.1"
    "nv_one_logger_pytorch_lightning_integration>=2.3.1" "nvidia_resiliency_ext==0.4.1" "pytest>=8"
)
# their declared requirements pull in CUDA and audio packages that no test here needs
alone=("megatron-core==0.15.3" "nemo-toolkit==2.7.3")
wanted="${resolved[*]} ${alone[*]}"
[[ -f $env/.stamp && $(<"$env/.stamp") == "$wanted" ]] && exit 0

for python in "${PYTHON311:-}" "$root/.venv/bin/python3.11" "$HOME"/.pyenv/versions/3.11*/bin/python3.11 python3.11; do
    [[ -n $python ]] && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && break
    python=
done
[[ -n $python ]] || { echo "nemo.sh: no Python 3.11 found; name one in PYTHON311" >&2; exit 1; }

rm -rf "$env"
"$python" -m venv "$env"
"$env/bin/pip" install --quiet "${resolved[@]}"
"$env/bin/pip" install --quiet --no-deps "${alone[@]}"
printf '%s' "$wanted" >"$env/.stamp"
