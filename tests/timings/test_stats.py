from __future__ import annotations

import random
import statistics

import pytest

from mlflashpoint.timings import stats


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (10, 2.22814), (30, 2.04227), (1000, 1.96234)]
)
def test_students_quantile_is_the_one_of_the_tables(freedom: float, expected: float) -> None:
    assert stats.student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)


def test_quantiles_interpolate_as_numpy_does() -> None:
    numpy = pytest.importorskip("numpy")
    values = [random.Random(1).uniform(0, 9) for _ in range(17)]
    for share in (0.0, 0.05, 0.25, 0.5, 0.95, 1.0):
        assert stats.quantile(values, share) == pytest.approx(float(numpy.quantile(values, share)))


def test_quantiles_of_one_value_are_that_value() -> None:
    assert stats.quantile([3.0], 0.95) == stats.median([3.0]) == 3.0


def test_the_variance_is_the_unbiased_one() -> None:
    values = [1.0, 2.5, 4.0, 9.0]
    assert stats.variance(values) == pytest.approx(statistics.variance(values))


def test_welchs_interval_is_the_textbooks() -> None:
    # scipy.stats.ttest_ind(other, one, equal_var=False).confidence_interval()
    low, high = stats.welch_interval([20.1, 19.8, 20.4, 20.0], [21.0, 21.9, 20.7]) or (0, 0)
    assert (low, high) == pytest.approx((-0.24474077457755716, 2.49474077457755), rel=1e-9)


def test_no_interval_is_made_up_from_one_value() -> None:
    assert stats.welch_interval([1.0], [2.0, 3.0]) is None
    assert stats.bootstrap_difference([1.0, 2.0], [2.0], seed=0) is None


def test_equal_values_have_an_interval_without_width() -> None:
    assert stats.welch_interval([1.0, 1.0], [3.0, 3.0]) == (2.0, 2.0)
    assert stats.bootstrap_difference([1.0, 1.0], [3.0, 3.0], seed=0) == (2.0, 2.0)


def test_the_bootstrap_is_the_same_for_the_same_seed_only() -> None:
    generator = random.Random(0)
    one, other = ([generator.gauss(mean, 1) for _ in range(20)] for mean in (10, 11))
    first = stats.bootstrap_difference(one, other, seed=1)
    assert first == stats.bootstrap_difference(one, other, seed=1)
    assert first != stats.bootstrap_difference(one, other, seed=2)


def test_the_bootstraps_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    generator, hits = random.Random(5), 0
    for trial in range(200):
        one = [generator.gauss(10, 1) for _ in range(20)]
        other = [generator.gauss(11, 2) for _ in range(25)]
        low, high = stats.bootstrap_difference(one, other, seed=trial, resamples=500) or (0, 0)
        hits += low <= 1.0 <= high
    assert 180 <= hits <= 199


@pytest.mark.parametrize("kind", ["normal", "skewed", "a few that are very slow"])
def test_the_interval_of_many_values_agrees_with_that_of_full_resamples(kind: str) -> None:
    generator = random.Random(3)

    def drawn(count: int) -> list[float]:
        if kind == "normal":
            return [generator.gauss(10, 1) for _ in range(count)]
        values = [generator.lognormvariate(0, 1.5) for _ in range(count)]
        if kind.startswith("a few"):
            values[:4] = [3000.0, 900.0, 1200.0, 2000.0]
        return values

    one, other = drawn(1500), drawn(2500)
    assert min(len(one), len(other)) > stats.FULL_RESAMPLES_TO
    differences = [
        statistics.fmean(generator.choices(other, k=len(other))) - statistics.fmean(generator.choices(one, k=len(one)))
        for _ in range(2000)
    ]
    expected = stats.quantile(differences, 0.025), stats.quantile(differences, 0.975)
    width = expected[1] - expected[0]
    assert stats.bootstrap_difference(one, other, seed=0) == pytest.approx(expected, abs=0.08 * width)


def test_the_number_of_draws_does_not_grow_with_the_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0

    class Counting(random.Random):
        def random(self) -> float:
            nonlocal drawn
            drawn += 1
            return super().random()

    monkeypatch.setattr(stats.random, "Random", Counting)
    values = [random.gauss(10, 1) for _ in range(100_000)]
    stats.bootstrap_difference(values, values, seed=0)
    assert 0 < drawn < 5_000_000


def test_many_equal_values_have_an_interval_without_width() -> None:
    assert stats.bootstrap_difference([0.1] * 5000, [0.3] * 5000, seed=0) == pytest.approx((0.2, 0.2), rel=1e-12)
