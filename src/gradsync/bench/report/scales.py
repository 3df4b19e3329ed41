"""From values to places on a plot: scales, round ticks, and their words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_TIME_UNITS: Final = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The values from ``low`` to ``high``, on the places from ``start`` to ``end``.

    >>> Scale(low=0, high=10, start=100, end=200)(5)
    150.0
    >>> Scale(low=1, high=100, start=0, end=200, is_log=True)(10)
    100.0
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; what lies outside is put at the nearer end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from ``low`` to ``high``, at most so many, evenly spaced.

    >>> linear_ticks(0, 87)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    >>> linear_ticks(0.93, 1.17)
    [0.95, 1.0, 1.05, 1.1, 1.15]
    """
    if not high > low:
        return [low]
    step = _round_step((high - low) / most)
    while len(ticks := _multiples(low, high, step)) > most:
        step = _round_step(step * 1.01)
    return ticks


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """The same for a logarithmic scale: 1, 2, 5, 10 … or only powers of ten, as there is room.

    >>> log_ticks(0.3, 12)
    [0.5, 1.0, 2.0, 5.0, 10.0]
    >>> log_ticks(1e-6, 1e-2)
    [1e-06, 1e-05, 0.0001, 0.001, 0.01]
    """
    ticks: list[float] = []
    for leads in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = _with_leads(leads, low, high)
        if len(ticks) <= most:
            break
    ticks = ticks[:: math.ceil(len(ticks) / most)] if len(ticks) > most else ticks
    return ticks if len(ticks) >= 2 else linear_ticks(low, high, most)


def ratio_ticks(low: float, high: float, fewest: int = 4) -> list[float]:
    """For ratios, where 1 matters most and is always among them.

    >>> ratio_ticks(0.48, 2.1), ratio_ticks(0.8, 1.25)
    ([0.5, 0.7, 1.0, 1.5, 2.0], [0.8, 0.9, 1.0, 1.1, 1.2])
    """
    for leads in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = _with_leads(leads, low, high)
        if len(ticks) >= fewest:
            return ticks
    ticks = linear_ticks(low, high)
    return ticks if 1.0 in ticks else sorted([*ticks, 1.0])


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many of them, evenly, the last one included.

    >>> thinned([1, 2, 4, 8, 16, 32, 64], 4)
    [1, 4, 16, 64]
    """
    stride = max(1, math.ceil(len(values) / most))
    return list(values[::-1][::stride][::-1])


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for times up to that one, and its factor.

    >>> time_unit(0.25), time_unit(3e-5)
    (('ms', 1000.0), ('µs', 1000000.0))
    """
    for name, factor in _TIME_UNITS:
        if seconds * factor >= 1:
            return name, factor
    return _TIME_UNITS[-1]


def number(value: float) -> str:
    """As short as it can be read.

    >>> number(12000), number(0.05), number(1.0)
    ('12,000', '0.05', '1')
    """
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def short_time(seconds: float) -> str:
    """For ticks, where the values are round.

    >>> short_time(1e-5), short_time(0.05), short_time(2.0)
    ('10 µs', '50 ms', '2 s')
    """
    unit, factor = time_unit(seconds * (1 + 1e-9))
    return f"{seconds * factor:.4g} {unit}"


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * lead for lead in _STEPS if power * lead >= step * (1 - 1e-9))


def _with_leads(leads: Sequence[float], low: float, high: float) -> list[float]:
    """The powers of ten times each of ``leads`` that lie inside."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    values = [float(f"{lead}e{power}") for power in range(first, last + 1) for lead in leads]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{count * step:.12g}") for count in range(first, last + 1)]
