"""What the gradsync backend is to reach, as ratios of one run on two cores.

[Note: met or missed]
A target is met when the whole 95 % interval of the ratio is at or above it, missed when the whole
interval is below, and open when it is inside. Too few rounds leave it open as well.
"""

from __future__ import annotations

from race.exercises import ALL_REDUCE, BARE, COPIED, GLOO, OPENMPI, PERSISTENT, SYMMETRIC
from race.stats import CONFIDENCE, Interval

CORES = 2  # what the numbers below are for
KB, MB = 1024, 1024 * 1024
SIZES = (4 * KB, 256 * KB, 4 * MB, 25 * MB, 100 * MB)
SIZES_OF_OTHERS = (4 * KB, 4 * MB)
OTHERS_VERSUS_GLOO = 2.0
MET, MISSED, OPEN = "met", "missed", "open"

# (contender, compared with, ranks): a target for each of SIZES
ALL_REDUCES: dict[tuple[str, str, int], tuple[float | None, ...]] = {
    (SYMMETRIC, GLOO, 2): (40, 25, 12, 6, 6),
    (COPIED, GLOO, 2): (30, 12, 6, 4, 4),
    (SYMMETRIC, GLOO, 4): (30, 25, 12, 8, 6),
    (SYMMETRIC, OPENMPI, 2): (None, 1, 1.5, 1.5, 3),
    (SYMMETRIC, BARE, 2): (None, 0.50, 0.75, 0.80, 0.80),
    (PERSISTENT, BARE, 2): (None, 0.50, 0.75, 0.80, 0.80),  # without torch's front, as bare is
}


def target(operation: str, contender: str, versus: str, world: int, size: int) -> float | None:
    if operation == ALL_REDUCE:
        row = ALL_REDUCES.get((contender, versus, world), (None,) * len(SIZES))
        return dict(zip(SIZES, row, strict=True)).get(size)
    is_known = operation == "barrier" or size in SIZES_OF_OTHERS
    return OTHERS_VERSUS_GLOO if is_known and versus == GLOO else None


def verdict(spread: Interval, wanted: float) -> str:
    if spread.coverage < CONFIDENCE:
        return OPEN
    if spread.low >= wanted:
        return MET
    return MISSED if spread.high < wanted else OPEN
