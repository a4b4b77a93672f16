#!/usr/bin/env bash
# Build .venv: Python 3.11, torch for the CPU, the test tools, and this package in editable form. The tests run from it
# and start each framework in an environment of its own. Idempotent: a stamp names what it holds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
env=$root/.venv
packages=(
    "torch==2.13.0" "numpy>=2,<3" "wrapt==2.5.2" "xxhash==4.1.0" "pytest==9.2.0" "hypothesis==6.170.17"
    "ruff==0.17.6" "mypy==2.4.1" "setuptools==84.2.1" "wheel==0.48.0" "build==1.6.1"
    "cloudpickle==3.1.3" "ray==2.60.0"
)
wanted="${packages[*]} $(sha256sum <"$root/pyproject.toml")"
[[ -f $env/.stamp && $(<"$env/.stamp") == "$wanted" ]] && exit 0

"$env/bin/python" -I -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
    python=$("$here/../find_python.sh" 3.11)
    rm -rf "$env"
    "$python" -m venv "$env"
}
echo "building $env ..." >&2
"$env/bin/python" -m pip --disable-pip-version-check -q install "${packages[@]}"
"$env/bin/python" -m pip --disable-pip-version-check -q install --no-deps --no-build-isolation -e "$root"
printf '%s' "$wanted" >"$env/.stamp"
