"""A plot of ratios: bars from 1 to the ratio, with the interval as a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from gradsync.bench.report.colours import Style
from gradsync.bench.report.frame import LEFT, RIGHT, bottom_axis, heading
from gradsync.bench.report.scales import Scale, number, ratio_ticks
from gradsync.bench.report.svg import WIDTH, Figure, fitted, line, rect, text, text_width

_GROUP: Final = 24  # the height of a group's name
_ROW: Final = 42
_BAR: Final = 12


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A ratio and its interval, if it has one."""

    group: str  # bars of one group stand under its name
    label: str
    style: Style
    value: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""

    @property
    def words(self) -> str:
        """The figures for people.

        >>> Bar(group="", label="", style=Style(slot="0", shape=0), value=1.5).words
        '1.50'
        """
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f} … {self.high:.2f}]"


def bar_plot(
    bars: Sequence[Bar],
    *,
    name: str,
    title: str,
    subtitle: str,
    says: str,
    numbers: str = "",
    axis: str,
) -> Figure:
    """Draw the bars, each under its label; to the right of 1 is faster."""
    groups = [(group, list(members)) for group, members in groupby(bars, key=lambda bar: bar.group)]
    named = [group for group, _ in groups if group]
    head, top = heading(title, subtitle)
    bottom = top + _GROUP * len(named) + _ROW * len(bars) + 4
    scale = _scale(bars)
    parts = [
        head,
        bottom_axis(
            scale, ratio_ticks(scale.low, scale.high), number, axis, top=top, bottom=bottom
        ),
        line(scale(1), top, scale(1), bottom, "edge", width=1),
    ]
    y = top
    for group, members in groups:
        if group:
            parts.append(_words(LEFT, y + 17, fitted(group, RIGHT - LEFT), "muted bold"))
            y += _GROUP
        for bar in members:
            parts.append(_draw(bar, scale, y))
            y += _ROW
    return Figure(
        name=name, title=title, subtitle=subtitle, says=says, numbers=numbers,
        height=bottom + 42, body="".join(parts),
    )  # fmt: skip


def _scale(bars: Sequence[Bar]) -> Scale:
    low = min([0.9, *(bar.low or bar.value for bar in bars)])
    high = max([1.12, *(bar.high or bar.value for bar in bars)])
    return Scale(low=low / 1.04, high=high * 1.04, start=LEFT + 4, end=RIGHT, is_log=True)


def _draw(bar: Bar, scale: Scale, y: float) -> str:
    one, end = scale(1), scale(bar.value)
    middle = y + 25
    words = f"{bar.words} {bar.verdict}".rstrip()
    room = RIGHT - LEFT - text_width(words) - 12
    hint = f"{bar.label}: {words}"
    parts = [
        _words(LEFT, y + 13, fitted(bar.label, room), "ink"),
        _words(RIGHT, y + 13, words, "muted", anchor="end"),
        rect(min(one, end), middle - _BAR / 2, abs(end - one), _BAR, bar.style.fill, hint=hint),
    ]
    if bar.low is not None and bar.high is not None:
        low, high = scale(bar.low), scale(bar.high)
        parts.append(line(low, middle, high, middle, "edge", width=1.5))
        parts += [line(x, middle - 4, x, middle + 4, "edge", width=1.5) for x in (low, high)]
    return "".join(parts)


def _words(x: float, y: float, words: str, class_: str, *, anchor: str = "") -> str:
    """Words on a strip of the background, so that grid lines do not cross them."""
    width = text_width(words)
    left = x - width if anchor == "end" else x
    strip = rect(left - 2, y - 11, min(width + 4, WIDTH - left), 15, "surface")
    return strip + text(x, y, words, class_, anchor=anchor)
