"""What is concluded from times. Pure: lists of seconds in, numbers out.

[Note: blocks]
The steps of one turn, and the ranks of one step, share the machine's mood: they are not
independent, and an interval that takes them for such is too narrow. So the bootstrap resamples
blocks, not steps. A block is a round of a run of ours, or one step of all ranks where a file has no
rounds. Inside one run the contenders take turns in every round, so the same rounds are drawn for
both sides (``paired``), and a slow moment of the machine cancels out. Two runs have nothing in
common, and are drawn apart.

[Note: few blocks]
The percentile bootstrap is too narrow when blocks are few. The interval is therefore taken at the
expanded percentiles of Hesterberg ("What Teachers Should Know about the Bootstrap", 2015), which
put Student's t in the place of the normal law. tests/bench/test_bench_stats.py simulates the
coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
FEWEST_BLOCKS: Final = 5  # below this no interval carries 95 %

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
TOO_FEW: Final = "too few to tell"

Blocks = Sequence[Sequence[float]]
"""Seconds of a step, one list a block; the blocks need not be of one length."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast: median of the baseline / median of the other, and its interval.

    >>> Ratio(value=1.25, low=1.2, high=1.3).verdict
    'faster'
    >>> Ratio(value=1.25, low=0.9, high=1.7).verdict
    'no difference'
    """

    value: float
    low: float | None = None  # None: too few blocks for an interval
    high: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the interval leaves 1 out, and on which side."""
        if self.low is None or self.high is None:
            return TOO_FEW
        if self.low > 1.0:
            return FASTER
        if self.high < 1.0:
            return SLOWER
        return NO_DIFFERENCE


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile as numpy defines it, interpolated between the two nearest values.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 75)
    3.25
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    share = place - below
    gap = ordered[above] - ordered[below]
    # From the nearer end, as numpy does: so the result never leaves the two values.
    return ordered[above] - gap * (1 - share) if share >= 0.5 else ordered[below] + gap * share


def median(values: Sequence[float]) -> float:
    """The 50th percentile.

    >>> median([1.0, 9.0, 2.0])
    2.0
    """
    return percentile(values, 50)


def change_percent(baseline: float, other: float) -> float:
    """The change of a time in per cent of the baseline; faster is positive, as in torch's diff.py.

    >>> change_percent(2.0, 1.0), change_percent(2.0, 3.0)
    (50.0, -50.0)
    """
    return 100.0 * (baseline - other) / baseline


def ratio_of_medians(
    baseline: Blocks,
    other: Blocks,
    *,
    paired: bool = False,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """The ratio of the medians and its bootstrap interval; see the notes above.

    The draws are those of ``seed``: the same times always give the same interval.

    >>> slow = [[2.0, 2.1], [2.1, 2.0], [1.9, 2.0], [2.0, 2.0], [2.2, 2.0], [2.0, 1.9]]
    >>> fast = [[second / 2 for second in block] for block in slow]
    >>> ratio = ratio_of_medians(slow, fast, paired=True)
    >>> ratio.value, ratio.low, ratio.verdict
    (2.0, 2.0, 'faster')
    """
    if paired:
        rounds = min(len(baseline), len(other))
        baseline, other = baseline[:rounds], other[:rounds]
    value = median(_pool(baseline)) / median(_pool(other))
    fewest = min(len(baseline), len(other))
    if fewest < FEWEST_BLOCKS:
        return Ratio(value=value)
    random = np.random.default_rng(seed)
    draws = random.integers(len(baseline), size=(resamples, len(baseline)))
    other_draws = draws if paired else random.integers(len(other), size=(resamples, len(other)))
    ratios = _medians(baseline, draws) / _medians(other, other_draws)
    tail = _expanded_tail(confidence, fewest)
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Ratio(value=value, low=min(float(low), value), high=max(float(high), value))


def _pool(blocks: Blocks) -> list[float]:
    return [value for block in blocks for value in block]


def _medians(blocks: Blocks, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The median of each draw: a draw is a row of block numbers."""
    longest = max(len(block) for block in blocks)
    table = np.full((len(blocks), longest), np.nan)
    for row, block in zip(table, blocks, strict=True):
        row[: len(block)] = block
    drawn = table[draws].reshape(len(draws), -1)
    has_gaps = bool(np.isnan(table).any())
    medians: npt.NDArray[np.float64] = (np.nanmedian if has_gaps else np.median)(drawn, axis=1)
    return medians


def _expanded_tail(confidence: float, blocks: int) -> float:
    """The probability left out on each side; smaller than nominal, since blocks are few."""
    wide = (blocks / (blocks - 1)) ** 0.5 * student_quantile((1 + confidence) / 2, blocks - 1)
    return NormalDist().cdf(-wide)


def student_quantile(probability: float, freedom: int) -> float:
    """Student's t quantile, by its expansion around the normal one; 4 degrees and more.

    >>> round(student_quantile(0.975, 9), 2)
    2.26
    """
    z = NormalDist().inv_cdf(probability)
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))
