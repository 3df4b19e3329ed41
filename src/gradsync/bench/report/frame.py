"""What all plots have: a heading, a legend, axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gradsync.bench.report.colours import Style
from gradsync.bench.report.scales import Scale
from gradsync.bench.report.svg import (
    WIDTH,
    fitted,
    line,
    marker,
    rect,
    text,
    text_width,
)

LEFT: Final = 8  # of headings and rows
RIGHT: Final = WIDTH - 14
_TITLE_SIZE: Final = 15
_LEGEND_ROW: Final = 20
_SWATCH: Final = 22
_BOX: Final = 12


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend: a line with its mark, a dashed line, or a filled box."""

    label: str
    style: Style | None = None
    dash: str = ""
    box: str = ""  # the class of its filling
    opacity: float = 1.0


def heading(title: str, subtitle: str) -> tuple[str, float]:
    """Title and subtitle, and where they end; a long title goes on in a second line."""
    parts, y = [], 20
    for words in title_lines(title):
        parts.append(text(LEFT, y, words, "ink bold", size=_TITLE_SIZE))
        y += 19
    parts.append(text(LEFT, y - 2, fitted(subtitle, RIGHT - LEFT)))
    return "".join(parts), y + 5


def title_lines(title: str) -> list[str]:
    """One line, or two where it has a part before its last colon and is too long.

    >>> title_lines("mlp: time of a step")
    ['mlp: time of a step']
    >>> title_lines("a model with quite a long name: how many times as fast as torch")
    ['a model with quite a long name:', 'how many times as fast as torch']
    """
    room = (RIGHT - LEFT) / 1.05  # it is bold
    before, colon, after = title.rpartition(": ")
    lines = [title]
    if colon and text_width(title, _TITLE_SIZE) > room:
        lines = [f"{before}:", after]
    return [fitted(words, room, _TITLE_SIZE) for words in lines]


def legend(keys: Sequence[Key], top: float) -> tuple[str, float]:
    """The entries in as many rows as they need, and where the rows end."""
    x, y, parts = float(LEFT), top + 12, []
    for key in keys:
        swatch = _BOX if key.box else _SWATCH
        label = fitted(key.label, RIGHT - LEFT - swatch - 6)
        taken = swatch + 6 + text_width(label)
        if x > LEFT and x + taken > RIGHT:
            x, y = float(LEFT), y + _LEGEND_ROW
        parts += [_swatch(key, x, y - 4), text(x + swatch + 6, y, label, "ink")]
        x += taken + 10
    return "".join(parts), y + 8 if keys else top


def bottom_axis(
    scale: Scale,
    ticks: Sequence[float],
    show: Callable[[float], str],
    title: str,
    *,
    top: float,
    bottom: float,
) -> str:
    """Vertical grid lines with their values below, and what they are."""
    parts = []
    for tick in ticks:
        x = scale(tick)
        words = show(tick)
        # Words at an end of the axis stay inside the drawing.
        half = text_width(words, 11) / 2
        place = min(max(x, half), WIDTH - half - 2)
        parts.append(line(x, top, x, bottom, "grid"))
        parts.append(text(place, bottom + 15, words, size=11, anchor="middle"))
    parts.append(line(scale.start, bottom, scale.end, bottom, "axis"))
    middle = (scale.start + scale.end) / 2
    parts.append(text(middle, bottom + 32, fitted(title, RIGHT - LEFT), anchor="middle"))
    return "".join(parts)


def left_axis(
    scale: Scale,
    ticks: Sequence[float],
    show: Callable[[float], str],
    title: str,
    *,
    left: float,
    right: float,
) -> str:
    """Horizontal grid lines with their values at the left; what they are stands on top."""
    parts = [text(LEFT, scale.end - 10, title)]
    for tick in ticks:
        y = scale(tick)
        parts.append(line(left, y, right, y, "axis" if y == scale.start else "grid"))
        parts.append(text(left - 7, y + 4, show(tick), size=11, anchor="end"))
    return "".join(parts)


def _swatch(key: Key, x: float, y: float) -> str:
    if key.box:
        return rect(x, y - 5, _BOX, 10, key.box, rx=2, fill_opacity=key.opacity)
    stroke, fill = ("edge", "ink") if key.style is None else (key.style.stroke, key.style.fill)
    drawn = line(x, y, x + _SWATCH, y, stroke, width=2, dash=key.dash)
    if key.style is None:
        return drawn
    return drawn + marker(x + _SWATCH / 2, y, key.style.shape, fill)
