"""The statistics: against numpy and scipy, as properties, and the coverage by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.bench import stats

seconds = st.floats(min_value=1e-9, max_value=1e6)
times = st.lists(seconds, min_size=1, max_size=50)
blocks = st.lists(st.lists(seconds, min_size=1, max_size=4), min_size=5, max_size=9)


@given(times, st.floats(min_value=0, max_value=100))
@settings(deadline=None)
def test_percentiles_agree_with_numpys(values, percent):
    assert stats.percentile(values, percent) == pytest.approx(
        np.percentile(values, percent), rel=1e-12
    )


@given(times, st.floats(min_value=0, max_value=100))
@settings(deadline=None)
def test_a_percentile_lies_within_the_values(values, percent):
    assert min(values) <= stats.percentile(values, percent) <= max(values)


def test_a_percentile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one value"):
        stats.percentile([], 50)


@given(seconds, seconds)
@settings(deadline=None)
def test_a_change_is_positive_exactly_when_the_time_is_shorter(before, after):
    assert (stats.change_percent(before, after) > 0) == (after < before)


@given(blocks, blocks, st.booleans())
@settings(deadline=None)
def test_the_interval_holds_the_ratio_and_is_the_same_each_time(a, b, paired):
    first = stats.ratio_of_medians(a, b, paired=paired, resamples=50)
    assert first.low <= first.value <= first.high
    assert first == stats.ratio_of_medians(a, b, paired=paired, resamples=50)


@given(blocks)
@settings(deadline=None)
def test_times_do_not_differ_from_themselves(a):
    same = stats.ratio_of_medians(a, a, paired=True, resamples=50)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    assert same.verdict == stats.NO_DIFFERENCE
    assert stats.ratio_of_medians(a, a, resamples=50).verdict == stats.NO_DIFFERENCE


@given(blocks, st.sampled_from([0.25, 0.5, 2.0, 4.0]))
@settings(deadline=None)
def test_the_ratio_scales_with_the_times_and_so_does_its_interval(a, factor):
    b = [[value * factor for value in block] for block in a]
    ratio = stats.ratio_of_medians(a, b, paired=True, resamples=50)
    assert ratio.value == pytest.approx(1 / factor)
    assert ratio.verdict == (stats.FASTER if factor < 1 else stats.SLOWER)


def test_fewer_than_five_blocks_carry_no_verdict():
    few = stats.ratio_of_medians([[2.0]] * 4, [[1.0]] * 4)
    assert (few.value, few.low, few.verdict) == (2.0, None, stats.TOO_FEW)


def test_a_paired_ratio_leaves_out_the_rounds_that_only_one_side_has():
    assert stats.ratio_of_medians([[2.0]] * 6 + [[100.0]] * 6, [[1.0]] * 6, paired=True).value == 2


def test_a_slow_moment_that_both_sides_share_cancels_out():
    moods = [1.0, 3.0, 1.1, 9.0, 1.0, 2.0, 1.0, 5.0]
    slow = [[1.05 * mood] * 3 for mood in moods]
    fast = [[1.00 * mood] * 3 for mood in moods]
    assert stats.ratio_of_medians(slow, fast, paired=True).verdict == stats.FASTER
    assert stats.ratio_of_medians(slow, fast).verdict == stats.NO_DIFFERENCE


@pytest.mark.parametrize("freedom", [4, 5, 9, 30, 1000])
@pytest.mark.parametrize("probability", [0.9, 0.95, 0.975, 0.995])
def test_students_quantile_agrees_with_scipys(probability, freedom):
    expected = pytest.importorskip("scipy.stats").t.ppf(probability, freedom)
    assert stats.student_quantile(probability, freedom) == pytest.approx(expected, rel=0.01)


# Steps as a machine gives them: a mood for each round, noise for each step, and now and then a
# step that takes twice as long.
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("rounds", [5, 10, 30])
def test_the_interval_covers_the_truth_as_often_as_it_says(rounds, paired):
    random = np.random.default_rng(rounds)
    true_ratio, trials, covered = 1.05, 200, 0
    for _ in range(trials):
        moods = np.exp(random.normal(0, 0.05, (2, rounds, 1)))
        if paired:
            moods[1] = moods[0]
        noise = np.exp(random.normal(0, 0.03, (2, rounds, 5)))
        noise *= np.where(random.random(noise.shape) < 0.03, 2.0, 1.0)
        steps = moods * noise
        ratio = stats.ratio_of_medians(
            (true_ratio * steps[0]).tolist(), steps[1].tolist(), paired=paired, resamples=300
        )
        covered += ratio.low <= true_ratio <= ratio.high
    assert covered / trials >= 0.92, f"covers {covered / trials:.1%}"
