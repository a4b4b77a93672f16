"""Two arms side by side: the rows, the control that vouches for them, and the headline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlflashpoint.errors import ComparisonOptionError, TimingsError
from mlflashpoint.timings import stats
from mlflashpoint.timings.common import common_saves
from mlflashpoint.timings.control import CONTROLS, TOLERANCE_PERCENT, judge
from mlflashpoint.timings.samples import BACKGROUND, OURS, TimingSet

#: timers of the saves that stand in for durable ones, the preferred one first
SUBSTITUTES = ("save-checkpoint-non-persistent", "observed-non-persistent-save", "flashpoint-save")

MODE_SENTENCE = (
    "It is a saving only in replace mode, where those steps skip the durable write; in non_persistent and augment mode "
    "the durable write still happens, and the memory save is added cost."
)


_Arms = tuple[TimingSet, TimingSet]


@dataclass(frozen=True)
class Summary:
    """One timer of one arm; times in seconds per save."""

    n: int
    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(len(values), stats.mean(values), stats.median(values), stats.quantile(values, 0.95))


@dataclass(frozen=True)
class Row:
    """One timer in both arms; what needs both sides is None where one is missing.

    Attributes:
        delta: candidate's mean minus baseline's, seconds.
        percent: the same in percent of the baseline's mean.
        factor: baseline's mean over candidate's.
        interval: 95 % bootstrap interval of ``delta``; None with fewer than two saves on a side.
        control: whether this is the row that neither arm changes.
        background: whether the time blocks nothing.
    """

    timer: str
    baseline: Summary | None
    candidate: Summary | None
    delta: float | None = None
    percent: float | None = None
    factor: float | None = None
    interval: tuple[float, float] | None = None
    control: bool = False
    background: bool = False


@dataclass(frozen=True)
class Headline:
    """Durable save of the baseline against its substitute in the candidate; means in seconds."""

    durable_timer: str
    durable: float
    substitute_timer: str
    substitute: float

    @property
    def factor(self) -> float | None:
        return self.durable / self.substitute if self.substitute else None


@dataclass(frozen=True)
class Comparison:
    """What the reports show.

    Attributes:
        invalid: reasons why the difference between the arms can't be put down to what was to be compared.
        cautions: what else a reader has to know.
        control: one sentence about the control row.
        vouched: whether the control shows the runs to be alike.
        skipped_first: saves of each timer and run that were left out at the start.
    """

    baseline: TimingSet
    candidate: TimingSet
    rows: tuple[Row, ...]
    control: str
    vouched: bool
    invalid: tuple[str, ...]
    cautions: tuple[str, ...]
    headline: Headline | None
    seed: int
    skipped_first: int


def compare(
    baseline: TimingSet,
    candidate: TimingSet,
    *,
    skip_first: int = 0,
    control: str | None = None,
    headline: bool = False,
    durable: str | None = None,
    substitute: str | None = None,
    seed: int = 0,
    tolerance_percent: float = TOLERANCE_PERCENT,
) -> Comparison:
    """Compare two labels.

    Args:
        baseline: the arm that is compared with.
        candidate: the arm under test.
        skip_first: saves of each timer to leave out at the start of each run.
        control: timer that neither arm changes; by default the first of ``CONTROLS`` that both have.
        headline: whether to work out durable against substituted.
        durable: timer of the headline in the baseline, by default the control.
        substitute: timer of the headline in the candidate, by default the first of ``SUBSTITUTES`` that it has.
        seed: of the bootstrap.
        tolerance_percent: difference of the control that is never held against the comparison.

    Raises:
        TimingsError: both have one label, or one has no timer.
        ComparisonOptionError: nothing is left after ``skip_first``, or a timer that was asked for is missing.
    """
    if baseline.label == candidate.label:
        raise TimingsError(
            f"the label {baseline.label!r} is used twice", remedy="parse the two arms' logs with two different labels"
        )
    one, other = baseline.without_first(skip_first), candidate.without_first(skip_first)
    for timings, whole in ((one, baseline), (other, candidate)):
        if not whole.timers:
            raise TimingsError(f"there is no timer in {whole.label!r}", remedy="parse the logs of that arm again")
        if not timings.timers:
            raise ComparisonOptionError(
                f"no sample of {timings.label!r} is left",
                option="skip_first",
                remedy="leave fewer out with --skip-first",
            )
    name = _control_name((one, other), (baseline, candidate), control)
    names = sorted({*one.timers, *other.timers}, key=lambda timer: _place(timer, name, one, other))
    rows = tuple(_row(timer, one, other, timer == name, seed) for timer in names)
    verdict = judge(name, _values(one, name), _values(other, name), tolerance_percent)
    return Comparison(
        baseline=one,
        candidate=other,
        rows=rows,
        control=verdict.sentence,
        vouched=verdict.holds,
        invalid=verdict.against + _different_jobs(one, other) + common_saves(baseline, candidate),
        cautions=tuple(_cautions(rows, one, other) + _left_out((one, other), (baseline, candidate))),
        headline=_headline((one, other), (baseline, candidate), durable or name, substitute) if headline else None,
        seed=seed,
        skipped_first=skip_first,
    )


def _control_name(arms: _Arms, whole: _Arms, wanted: str | None) -> str | None:
    if wanted is not None:
        for timings, before in zip(arms, whole, strict=True):
            if wanted not in timings.timers:
                skipped = wanted if wanted in before.timers else None
                raise _no_timer(f"timer {wanted!r}", timings, skipped, option="control")
        return wanted
    return next((timer for timer in CONTROLS if all(timer in timings.timers for timings in arms)), None)


def _no_timer(
    what: str, timings: TimingSet, skipped: str | None, *, option: str, start: str = "", advice: str = ""
) -> ComparisonOptionError:
    """The error for a timer that is not there; ``skipped`` is its name where all its saves are left out."""
    if skipped is not None:
        return ComparisonOptionError(
            f"{start}no sample of {skipped!r} in {timings.label!r} is left",
            option=option,
            remedy="leave fewer out with --skip-first",
        )
    return ComparisonOptionError(
        f"{start}no {what} in {timings.label!r}", option=option, remedy=f"{advice}{_names(timings)}"
    )


def _names(timings: TimingSet) -> str:
    return f"it has {', '.join(timings.timers)}"


def _place(timer: str, control: str | None, one: TimingSet, other: TimingSet) -> tuple[bool, bool, bool, int, str]:
    """Sort key: the control, then what both have, then the rest; our own timers lie inside the frameworks' ones."""
    sides = 0 if timer in one.timers and timer in other.timers else 1 if timer in other.timers else 2
    return timer != control, timer.startswith(BACKGROUND), timer.startswith(OURS), sides, timer


def _values(timings: TimingSet, timer: str | None) -> list[float]:
    return [sample.seconds for sample in timings.timers.get(timer or "", ())]


def _row(timer: str, one: TimingSet, other: TimingSet, control: bool, seed: int) -> Row:
    before, after = _values(one, timer), _values(other, timer)
    background = timer.startswith(BACKGROUND)
    if not before or not after:
        left, right = (Summary.of(values) if values else None for values in (before, after))
        return Row(timer, left, right, control=control, background=background)
    left, right = Summary.of(before), Summary.of(after)
    delta = right.mean - left.mean
    return Row(
        timer,
        left,
        right,
        delta=delta,
        percent=100 * delta / left.mean if left.mean else None,
        factor=left.mean / right.mean if right.mean else None,
        interval=stats.bootstrap_difference(before, after, seed=seed),
        control=control,
        background=background,
    )


def _different_jobs(one: TimingSet, other: TimingSet) -> tuple[str, ...]:
    found = []
    for fact, words in (
        ("frameworks", "framework"),
        ("parameters", "number of parameters"),
        ("world_size", "world size"),
    ):
        mine, theirs = one.job.get(fact, []), other.job.get(fact, [])
        if mine and theirs and set(map(str, mine)).isdisjoint(map(str, theirs)):
            found.append(
                f"the {words} differs: {', '.join(map(str, mine))} in {one.label}, "
                f"{', '.join(map(str, theirs))} in {other.label}"
            )
    return tuple(found)


def _cautions(rows: Sequence[Row], one: TimingSet, other: TimingSet) -> list[str]:
    found = []
    few = [
        f"{row.timer} ({summary.n} in {timings.label})"
        for row in rows
        for summary, timings in ((row.baseline, one), (row.candidate, other))
        if summary is not None and summary.n < 5
    ]
    if few:
        found.append(f"Fewer than 5 saves, too few for the interval and the p95 to mean much: {', '.join(few)}.")
    for timings in (one, other):
        found += [f"{timings.label}: {note}." for note in timings.notes]
    return found


def _left_out(arms: _Arms, whole: _Arms) -> list[str]:
    return [
        f"{timer}: all {len(samples)} saves of {timings.label} are among the first ones, which are left out."
        for timings, before in zip(arms, whole, strict=True)
        for timer, samples in before.timers.items()
        if timer not in timings.timers
    ]


def _headline(arms: _Arms, whole: _Arms, durable: str | None, substitute: str | None) -> Headline:
    def chosen(side: int, wanted: str | None, first: tuple[str, ...], what: str, option: str) -> str:
        def among(known: Collection[str]) -> str | None:
            if wanted is not None:
                return wanted if wanted in known else None
            # behind the bracket stands the group that the save was of
            return next((timer for name in first for timer in known if timer.partition("[")[0] == name), None)

        found = among(arms[side].timers)
        if found is None:
            what = f"timer of {what} saves" if wanted is None else f"timer {wanted!r}"
            start, advice = "no headline: ", f"name one with --{option}; "
            skipped = among(whole[side].timers)
            raise _no_timer(what, arms[side], skipped, option="headline", start=start, advice=advice)
        return found

    durable = chosen(0, durable, CONTROLS, "durable", "durable")
    substitute = chosen(1, substitute, SUBSTITUTES, "memory", "substitute")
    times = stats.mean(_values(arms[0], durable)), stats.mean(_values(arms[1], substitute))
    return Headline(durable, times[0], substitute, times[1])
