"""A plot of curves: examples a second against ranks, times and bandwidths against sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gradsync.bench.report.colours import Style, dash_of
from gradsync.bench.report.frame import (
    RIGHT,
    Key,
    bottom_axis,
    heading,
    left_axis,
    legend,
)
from gradsync.bench.report.scales import Scale, linear_ticks, log_ticks, thinned
from gradsync.bench.report.svg import Figure, line, marker, path, text_width

_PLOT_HEIGHT: Final = 210
_MOST_X_TICKS: Final = 8
_COMPARED: Final = "1.5 4"  # the dashes of a line to compare with


@dataclass(frozen=True, kw_only=True)
class Point:
    """A place on a curve, with the span in which half of the values lie if it is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of one series of one run; without a style it is a line to compare with."""

    label: str
    points: Sequence[Point]
    style: Style | None = None
    run: int = 0


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What it shows, and how its values are written."""

    title: str
    show: Callable[[float], str]
    is_log: bool = False


def line_plot(
    curves: Sequence[Curve],
    *,
    name: str,
    title: str,
    subtitle: str,
    says: str,
    numbers: str = "",
    x_axis: Axis,
    y_axis: Axis,
    run_names: Sequence[str] = (),
) -> Figure:
    """Draw the curves. With more than one run its name is in the legend, by its dashes."""
    head, top = heading(title, subtitle)
    keys, top = legend(_keys(curves, run_names), top)
    top += 24  # for the words over the left axis
    bottom = top + _PLOT_HEIGHT
    places = [point for curve in curves for point in curve.points]
    y_scale, y_ticks = _y_axis(places, y_axis, top=top, bottom=bottom)
    left = 16 + max(text_width(y_axis.show(tick), 11) for tick in y_ticks)

    dashes = {run: dash_of(place) for place, run in enumerate(_runs(curves))}
    values = sorted({point.x for point in places})
    pad = 14
    x_scale = Scale(low=values[0], high=values[-1], start=left + pad, end=RIGHT - pad, is_log=True)
    parts = [
        head,
        keys,
        left_axis(y_scale, y_ticks, y_axis.show, y_axis.title, left=left, right=RIGHT),
        bottom_axis(
            x_scale, thinned(values, _MOST_X_TICKS), x_axis.show, x_axis.title,
            top=top, bottom=bottom,
        ),
        line(left, bottom, RIGHT, bottom, "axis"),
        *(_draw(curve, x_scale, y_scale, dashes.get(curve.run, "")) for curve in curves),
    ]  # fmt: skip
    return Figure(
        name=name, title=title, subtitle=subtitle, says=says, numbers=numbers,
        height=bottom + 42, body="".join(parts),
    )  # fmt: skip


def _y_axis(
    places: Sequence[Point], axis: Axis, *, top: float, bottom: float
) -> tuple[Scale, list[float]]:
    """From 0, or logarithmic from tick to tick."""
    highest = max(value for point in places for value in (point.y, point.high or point.y))
    lowest = min(value for point in places for value in (point.y, point.low or point.y))
    if axis.is_log:
        low, high = lowest * 0.8, highest * 1.25
        ticks = log_ticks(low, high)
    else:
        low, high = 0.0, highest * 1.06
        ticks = linear_ticks(low, high)
    return Scale(low=low, high=high, start=bottom, end=top, is_log=axis.is_log), ticks


def _keys(curves: Sequence[Curve], run_names: Sequence[str]) -> list[Key]:
    labels = {curve.label: Key(label=curve.label, style=curve.style) for curve in curves}
    for curve in curves:
        if curve.style is None:
            labels[curve.label] = Key(label=curve.label, dash=_COMPARED)
    runs = _runs(curves)
    if len(runs) < 2:
        return list(labels.values())
    lines = [Key(label=run_names[run], dash=dash_of(place)) for place, run in enumerate(runs)]
    return [*labels.values(), *lines]


def _runs(curves: Sequence[Curve]) -> list[int]:
    return sorted({curve.run for curve in curves if curve.style is not None})


def _draw(curve: Curve, x_scale: Scale, y_scale: Scale, dash: str) -> str:
    points = sorted(curve.points, key=lambda point: point.x)
    places = [(x_scale(point.x), y_scale(point.y)) for point in points]
    if curve.style is None:
        return path(places, "edge", width=1.5, dash=_COMPARED)
    parts = [path(places, curve.style.stroke, dash=dash)] if len(places) > 1 else []
    for point, (x, y) in zip(points, places, strict=True):
        if point.low is not None and point.high is not None:
            low, high = y_scale(point.low), y_scale(point.high)
            parts.append(line(x, low, x, high, curve.style.stroke, width=1))
        parts.append(marker(x, y, curve.style.shape, curve.style.fill, hint=point.hint))
    return "".join(parts)
