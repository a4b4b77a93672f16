"""The control: the timer that neither arm changes, and what its difference says about the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlflashpoint.timings import stats

#: timers of durable saves, which no arm changes, the preferred one first
CONTROLS = ("save-checkpoint", "global-checkpoint-save", "observed-durable-save")
#: a control that differs by no more is never held against the comparison
TOLERANCE_PERCENT = 2.0
#: with more noise than this a control that does not differ says nothing
LARGEST_NOISE_PERCENT = 30.0


@dataclass(frozen=True)
class Verdict:
    """What the control says.

    Attributes:
        sentence: it in words.
        holds: whether it vouches for the comparison.
        against: reasons why the comparison is invalid.
    """

    sentence: str
    holds: bool = False
    against: tuple[str, ...] = ()


def judge(timer: str | None, before: Sequence[float], after: Sequence[float], tolerance_percent: float) -> Verdict:
    """Hold the control's times in the two arms, seconds, against each other."""
    if timer is None:
        return Verdict("No control: no timer of durable saves is in both arms, so nothing vouches for the difference.")
    if not any(before) and not any(after):
        return Verdict(f"Control {timer} took no measurable time in either arm, so it vouches for nothing.")
    delta, base = stats.mean(after) - stats.mean(before), stats.mean(before)

    def shown(seconds: float, sign: str = "") -> str:
        # a share of nothing is no number
        value, unit = (100 * seconds / base, "%") if base else (1e3 * seconds, "ms")
        return f"{stats.rounded(value, 1):{sign}.1f} {unit}"

    # Welch's interval, not the bootstrap's: it is right for the three or four durable saves that a short run has
    interval = stats.welch_interval(before, after)
    change = shown(delta, "+")
    if interval is None:
        return Verdict(f"Control {timer}: {change}; one save in an arm does not tell its noise.")
    half = (interval[1] - interval[0]) / 2
    noise = f"noise of ±{shown(half)}"
    steady = half <= LARGEST_NOISE_PERCENT / 100 * base
    if interval[0] > 0 or interval[1] < 0:
        if abs(delta) <= tolerance_percent / 100 * base:
            return Verdict(
                f"Control {timer}: {change}, beyond its {noise}, within the tolerance of {tolerance_percent:g} %.",
                holds=steady,
            )
        return Verdict(
            f"Control {timer} differs by {change}, beyond its {noise}.",
            against=(
                f"the control {timer} differs by {change}, beyond its {noise}: the runs differ in something else than "
                "the arm",
            ),
        )
    if not steady:
        return Verdict(f"Control {timer}: {change}, but its {noise} would hide a difference of that size.")
    return Verdict(f"Control {timer}: {change}, within its {noise}.", holds=True)
