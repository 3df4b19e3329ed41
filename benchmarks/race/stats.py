"""What the race concludes from its times. Pure: lists of seconds in, rows out.

[Note: the ratio and its spread]
Contenders are compared inside a round, where the machine's mood is nearly the same for both, so
the ratio is taken per round: `torch_best / ours`, above 1 when ours is faster. `torch_best` is
the torch variant with the lower median over all rounds; it is one contender for the whole
workload, not the luckier of the two in each round.

Where a contender has a rival of its own (a hook of ours, and the hook of torch's that it takes
the place of), it is compared with that one.

The spread is the distribution-free 95 % confidence interval of the median: two order statistics,
chosen by the binomial law (for 9 rounds the 2nd and the 8th value). It needs no resampling
and no random seed, and for a handful of rounds it is more honest than a bootstrap. Fewer than 6
rounds cannot carry 95 %, and then the verdict says so. It also says so when the spread
is wider than `NOISY`: "as fast" is a finding, and a busy machine must not be able to produce it.

[Note: not gradsync.bench.stats]
The suite has single steps, and bootstraps the ratio of their medians over rounds. A race has one
value a round, and takes the median of the ratios of the rounds. The two estimates are different
numbers (1.22 and 1.20 of the same nine rounds), so neither can stand in for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95
NOISY = 1.2  # high / low of a spread from which "as fast" does not follow
IDEAL = "local"
REFERENCES = ("torch", "torch-tuned")
CHALLENGER_PREFIX = "gradsync"

FASTER = "faster"
AS_FAST = "as fast (within the spread)"
SLOWER = "slower"
TOO_NOISY = "too noisy to tell"
TOO_FEW = "too few rounds to tell"

Times = Mapping[str, Sequence[float]]
"""Contender -> seconds a step, one value a round, rounds aligned over contenders."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float
    coverage: float  # the confidence that it really carries


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Of a gradsync contender to the better torch variant; above 1 is faster."""

    versus: str
    per_round: tuple[float, ...]
    median: float
    spread: Interval
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Row:
    contender: str
    median_seconds: float
    share_of_local: float | None
    ratio: Ratio | None


def summarise(times: Times, rivals: Mapping[str, str] | None = None) -> list[Row]:
    """One row a contender, in the order given. Unfinished rounds are left out."""
    whole = complete_rounds(times)
    best = best_reference(whole)
    references = {name: best for name in whole if name.startswith(CHALLENGER_PREFIX)}
    references |= {name: rival for name, rival in (rivals or {}).items() if rival in whole}
    return [
        Row(
            contender=name,
            median_seconds=median(seconds),
            share_of_local=median(paired(whole[IDEAL], seconds)) if IDEAL in whole else None,
            ratio=compare(whole, name, reference) if (reference := references.get(name)) else None,
        )
        for name, seconds in whole.items()
    ]


def complete_rounds(times: Times) -> dict[str, list[float]]:
    """Only the rounds that every contender finished; nothing if there is none."""
    rounds = min((len(seconds) for seconds in times.values()), default=0)
    return {name: list(seconds[:rounds]) for name, seconds in times.items() if rounds}


def best_reference(times: Times) -> str | None:
    present = [name for name in REFERENCES if times.get(name)]
    return min(present, key=lambda name: median(times[name]), default=None)


def compare(times: Times, challenger: str, reference: str) -> Ratio:
    ratios = paired(times[reference], times[challenger])
    spread = median_interval(ratios)
    return Ratio(
        versus=reference,
        per_round=tuple(ratios),
        median=median(ratios),
        spread=spread,
        verdict=verdict(spread),
    )


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest pair of order statistics that covers the median with `confidence`.

    When even the extremes do not, the extremes, with the coverage that they have.
    """
    if not values:
        raise ValueError("median_interval needs at least one value")
    ordered, n = sorted(values), len(values)
    trim = 0
    while 2 * (trim + 1) < n and _coverage(n, trim + 1) >= confidence:
        trim += 1
    return Interval(low=ordered[trim], high=ordered[n - 1 - trim], coverage=_coverage(n, trim))


def verdict(spread: Interval, confidence: float = CONFIDENCE) -> str:
    if spread.coverage < confidence:
        return TOO_FEW
    if spread.low > 1.0:
        return FASTER
    if spread.high < 1.0:
        return SLOWER
    return AS_FAST if spread.high <= NOISY * spread.low else TOO_NOISY


def _coverage(n: int, trim: int) -> float:
    """Probability that the median lies between the values left after trimming both ends."""
    return 1.0 - 2.0 * sum(comb(n, k) for k in range(trim + 1)) / 2.0**n
