#!/usr/bin/env bash
# Print the path of a working Python of the version asked for, for example: tools/find_python.sh 3.12
# A name on PATH is not enough: a version manager's shim may stand there and refuse to run.
set -u
want=${1:?usage: find_python.sh MAJOR.MINOR}

works() {
    [ -x "$1" ] && [ "$("$1" -I -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$want" ]
}

candidates() {
    [ -n "${PYTHON:-}" ] && command -v "$PYTHON"
    type -aP "python$want" python3 python
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$want".*/bin/"python$want" \
        "$HOME/.local/share/uv/python/cpython-$want".*/bin/"python$want" \
        /opt/python*/bin/"python$want" /usr/local/bin/"python$want" /opt/homebrew/bin/"python$want" \
        "${CONDA_PREFIX:-/nonexistent}/bin/python$want"
}

while IFS= read -r path; do
    if works "$path"; then
        printf '%s\n' "$path"
        exit 0
    fi
done < <(candidates 2>/dev/null)

echo "no working python$want with venv found: install it (Debian: python$want and python$want-venv; pyenv: 'pyenv install $want'), or name one with PYTHON=/path/to/python$want" >&2
exit 1
