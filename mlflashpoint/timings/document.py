"""The comparison as JSON, for scripts; times in seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from mlflashpoint.timings.compare import MODE_SENTENCE, Comparison


def render(comparison: Comparison) -> str:
    """One object; a side that is missing, or a number that needs both, is null."""
    headline: dict[str, Any] | None = None
    if comparison.headline is not None:
        headline = {**asdict(comparison.headline), "factor": comparison.headline.factor, "meaning": MODE_SENTENCE}
    document = {
        "format": "mlflashpoint comparison",
        "version": 1,
        "baseline": comparison.baseline.label,
        "candidate": comparison.candidate.label,
        "vouched": comparison.vouched,
        "valid": not comparison.invalid,
        "invalid": list(comparison.invalid),
        "control": comparison.control,
        "cautions": list(comparison.cautions),
        "skipped_first": comparison.skipped_first,
        "seed": comparison.seed,
        "rows": [asdict(row) for row in comparison.rows],
        "headline": headline,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
