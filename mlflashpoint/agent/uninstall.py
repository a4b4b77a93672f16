"""``mlflashpoint uninstall``: undo ``mlflashpoint install``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlflashpoint.agent.install import uninstall
from mlflashpoint.errors import FlashpointError


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when this environment can't be changed."""
    parser = argparse.ArgumentParser("mlflashpoint uninstall", description="Undo 'mlflashpoint install'.")
    parser.parse_args(argv)
    try:
        path, changed = uninstall()
    except FlashpointError as error:
        sys.stderr.write(f"mlflashpoint: {error}\n")
        return 1
    sys.stdout.write(f"{'removed' if changed else 'was not installed'}: {path}\n")
    return 0
