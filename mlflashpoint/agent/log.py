"""The logger ``mlflashpoint``: its level from the settings, and a way out to stderr where the job has set up none."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from mlflashpoint.errors import SettingError
from mlflashpoint.settings import BY_NAME


class FallbackHandler(logging.Handler):
    """Writes to stderr, never to stdout, and only while the job's root logger has no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            # stderr may be closed or None; a log line is not worth an exception in the job
            return


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Set the level and the fallback handler, once; a level that the job has set itself is kept."""
    logger = logging.getLogger("mlflashpoint")
    if any(isinstance(handler, FallbackHandler) for handler in logger.handlers):
        return
    if logger.level == logging.NOTSET:
        try:
            logger.setLevel(BY_NAME["log_level"].read(os.environ if environ is None else environ))
        except SettingError:
            logger.setLevel(logging.INFO)
    handler = FallbackHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
