"""Small file systems for tests, which need root."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def mounted(folder, size="64k"):
    """A small file system of its own while the block runs; skips where mounts are not allowed."""
    folder.mkdir()
    options = f"size={size},mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]).returncode:
        pytest.skip("NOT RUN: mounts are not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    """Leave no room in it."""
    with open(folder / "other", "wb", buffering=0) as other, contextlib.suppress(OSError):
        while other.write(b"x" * 4096):
            pass
