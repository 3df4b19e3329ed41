"""A plot of distributions: the steps as dots, their middle half as a box, the median as a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gradsync.bench.report.colours import Style
from gradsync.bench.report.frame import LEFT, RIGHT, bottom_axis, heading
from gradsync.bench.report.scales import Scale, linear_ticks, number, time_unit
from gradsync.bench.report.svg import Figure, fitted, line, rect, tag, text, text_width
from gradsync.bench.stats import median, percentile
from gradsync.bench.tables import human_time

_ROW: Final = 54
_LANE: Final = 22  # where the dots are
_MOST_DOTS: Final = 240
_FAR: Final = 1.6  # times the largest 95th percentile: where the axis ends at the latest
_GOLDEN: Final = 0.618034  # multiples of it, less their whole part, are spread evenly


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The seconds of the steps of one series."""

    label: str
    style: Style
    seconds: Sequence[float]


def spread_plot(
    spreads: Sequence[Spread],
    *,
    name: str,
    title: str,
    subtitle: str,
    says: str,
    numbers: str = "",
    timed: str = "a step",
) -> Figure:
    """Draw them under each other, on one axis."""
    scale = _scale(spreads)
    unit, factor = time_unit(scale.high)
    head, top = heading(title, subtitle)
    bottom = top + _ROW * len(spreads) + 2
    ticks = [tick / factor for tick in linear_ticks(scale.low * factor, scale.high * factor)]
    parts = [
        head,
        bottom_axis(
            scale, ticks, lambda seconds: number(round(seconds * factor, 9)),
            f"time of {timed}, in {unit}",
            top=top, bottom=bottom,
        ),
    ]  # fmt: skip
    for index, spread in enumerate(spreads):
        parts.append(_draw(spread, scale, top + _ROW * index))
    return Figure(
        name=name, title=title, subtitle=subtitle, says=says, numbers=numbers,
        height=bottom + 42, body="".join(parts),
    )  # fmt: skip


def dots(seconds: Sequence[float], most: int = _MOST_DOTS) -> list[float]:
    """The values, or where they are too many so many of their quantiles.

    >>> dots([3.0, 1.0, 2.0]), len(dots([float(n) for n in range(1000)]))
    ([1.0, 2.0, 3.0], 240)
    """
    if len(seconds) <= most:
        return sorted(seconds)
    return [percentile(seconds, 100 * index / (most - 1)) for index in range(most)]


def _scale(spreads: Sequence[Spread]) -> Scale:
    """From 0, so that lengths compare; a few steps that took very long do not squeeze the rest."""
    highest = max(max(spread.seconds) for spread in spreads)
    usual = max(percentile(spread.seconds, 95) for spread in spreads)
    return Scale(low=0.0, high=min(highest * 1.02, usual * _FAR), start=LEFT + 2, end=RIGHT)


def _draw(spread: Spread, scale: Scale, y: float) -> str:
    middle = y + 33
    quarter, half, three = (percentile(spread.seconds, p) for p in (25, 50, 75))
    slower = sum(second > scale.high for second in spread.seconds)
    words = f"median {human_time(half)}, p95 {human_time(percentile(spread.seconds, 95))}"
    label = fitted(spread.label, RIGHT - LEFT - text_width(words) - 12)
    hint = (
        f"{spread.label}: median {human_time(median(spread.seconds))}, half of them from "
        f"{human_time(quarter)} to {human_time(three)}"
    )
    parts = [
        rect(LEFT - 2, y + 3, text_width(label) + 4, 15, "surface"),
        rect(RIGHT - text_width(words) - 2, y + 3, text_width(words) + 4, 15, "surface"),
        text(LEFT, y + 14, label, "ink"),
        text(RIGHT, y + 14, words, anchor="end"),
    ]
    for index, second in enumerate(dots(spread.seconds)):
        if second <= scale.high:
            offset = (index * _GOLDEN % 1 - 0.5) * _LANE
            circle = tag(
                "circle", cx=scale(second), cy=middle + offset, r=2, class_=spread.style.fill,
                fill_opacity=0.45,
            )  # fmt: skip
            parts.append(circle)
    box = rect(
        scale(quarter), middle - 7, scale(three) - scale(quarter), 14, spread.style.fill,
        hint=hint, fill_opacity=0.35,
    )  # fmt: skip
    parts.append(box)
    parts.append(line(scale(half), middle - 11, scale(half), middle + 11, "edge", width=2))
    if slower:
        words = f"{slower} slower →"
        parts.append(rect(RIGHT - text_width(words, 11) - 4, middle - 6, 200, 13, "surface"))
        parts.append(text(RIGHT, middle + 4, words, size=11, anchor="end"))
    return "".join(parts)
