#!/usr/bin/env bash
# Overlay for the tests of the optional Mooncake transport: .envs/mooncake, with the engine (its build without CUDA) and
# the RDMA libraries that it is linked to. Idempotent. Where they can't be had it says so, and those tests are skipped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
folder=$root/.envs/mooncake
wanted="mooncake-transfer-engine-non-cuda==0.3.13.post1"
[[ -f $folder/.stamp && $(<"$folder/.stamp") == "$wanted" ]] && exit
rm -rf "$folder"
mkdir -p "$folder/lib" "$folder/packages"
unavailable() {
    echo "mooncake.sh: $1 can't be had here: the Mooncake transport is not tested" >&2
    exit 0
}
"$python" -m pip install --quiet --no-deps --target "$folder" "$wanted" || unavailable "$wanted"
if ! ldconfig -p | grep -q "libibverbs.so.1"; then
    (cd "$folder/packages" && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 >/dev/null 2>&1) ||
        unavailable libibverbs1
    for package in "$folder"/packages/*.deb; do
        dpkg -x "$package" "$folder/packages/root"
    done
    find "$folder/packages/root" -name "lib*.so.*" -exec cp -P {} "$folder/lib" \;
fi
rm -rf "$folder/packages"
printf '%s' "$wanted" >"$folder/.stamp"
