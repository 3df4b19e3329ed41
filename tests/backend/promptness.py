"""How soon an error comes. Any one may be late on a busy machine, but not most of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median

SECONDS = 8.0  # for each, pauses included: clearly not by the deadline of a group, which is 20 s
ENOUGH = 5  # one that was paused is no median


class Delays:
    """Those of one file of tests, by what they have in common."""

    def __init__(self, promise: float) -> None:
        self._promise = promise
        self._of: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, seconds: float, *traits: str) -> None:
        assert seconds < SECONDS, (seconds, traits)
        for trait in traits:
            self._of[trait].append(seconds)

    def check(self) -> None:
        enough = {trait: sorted(of) for trait, of in self._of.items() if len(of) >= ENOUGH}
        late = {trait: of for trait, of in enough.items() if median(of) >= self._promise}
        assert not late, f"most of these took {self._promise} s and longer: {late}"


def check_best_of_three(attempt: Callable[[], float], promise: float) -> None:
    """For what is too rare for a median; as a rule there is one attempt."""
    delays: list[float] = []
    while len(delays) < 3:
        delays.append(attempt())
        assert delays[-1] < SECONDS, delays
        if delays[-1] < promise:
            return
    raise AssertionError(delays)
