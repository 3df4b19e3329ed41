"""A plot of one step on each rank: computing, and below it communication and its exposed part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gradsync.bench.report.colours import Style
from gradsync.bench.report.frame import LEFT, RIGHT, Key, bottom_axis, heading, legend
from gradsync.bench.report.scales import Scale, linear_ticks, number, time_unit
from gradsync.bench.report.svg import Figure, fitted, rect, text, text_width
from gradsync.bench.result import Timeline
from gradsync.bench.tables import human_time

MOST_RANKS: Final = 8  # of each series; the table has all
_NAME: Final = 24  # the height of a series' name
_RANK: Final = 25
_LANE: Final = 9
_HIDDEN: Final = 0.4  # how opaque communication is that was hidden


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The mean step of each rank of one series."""

    label: str
    style: Style
    timelines: Sequence[Timeline]


def timeline_plot(
    series: Sequence[Lanes], *, name: str, title: str, subtitle: str, says: str, numbers: str = ""
) -> Figure:
    """Draw the ranks of each series under its name, on one axis."""
    head, top = heading(title, subtitle)
    keys, top = legend(
        [
            Key(label="forward", box="forward"),
            Key(label="backward", box="backward"),
            Key(label="communication, hidden", box="ink", opacity=_HIDDEN),
            Key(label="exposed", box="ink"),
        ],
        top,
    )
    shown = [(each, list(each.timelines[:MOST_RANKS])) for each in series]
    longest = max(line.ended for _, lines in shown for line in lines)
    scale = Scale(low=0.0, high=longest * 1.01, start=LEFT + 50, end=RIGHT)
    unit, factor = time_unit(scale.high)
    ranks = sum(len(lines) for _, lines in shown)
    bottom = top + _NAME * len(shown) + _RANK * ranks + 4
    ticks = [tick / factor for tick in linear_ticks(0, scale.high * factor)]
    parts = [
        head,
        keys,
        bottom_axis(
            scale, ticks, lambda seconds: number(round(seconds * factor, 9)),
            f"time since the forward began, in {unit}", top=top, bottom=bottom,
        ),
    ]  # fmt: skip
    y = top
    for each, lines in shown:
        words = summary(each.timelines)
        label = fitted(each.label, RIGHT - LEFT - text_width(words) - 12)
        parts += [
            rect(LEFT - 2, y + 5, text_width(label) + 4, 15, "surface"),
            rect(RIGHT - text_width(words) - 2, y + 5, text_width(words) + 4, 15, "surface"),
            text(LEFT, y + 16, label, "ink"),
            text(RIGHT, y + 16, words, anchor="end"),
        ]
        y += _NAME
        for timeline in lines:
            parts.append(_draw(timeline, each, scale, y))
            y += _RANK
    return Figure(
        name=name, title=title, subtitle=subtitle, says=says, numbers=numbers,
        height=bottom + 42, body="".join(parts),
    )  # fmt: skip


def summary(timelines: Sequence[Timeline]) -> str:
    """How much of the communication was exposed, as the mean of the ranks.

    >>> summary([Timeline(rank=0, forward=1, backward=2, communication=0.5, exposed=0.1)])
    '100.00 ms of 500.00 ms exposed'
    """
    count = len(timelines)
    communication = sum(each.communication for each in timelines) / count
    exposed = sum(each.exposed for each in timelines) / count
    if not communication:
        return "no communication"
    return f"{human_time(exposed)} of {human_time(communication)} exposed"


def _draw(timeline: Timeline, lanes: Lanes, scale: Scale, y: float) -> str:
    """Computing above, communication below: what is beyond the end of the backward is exposed."""
    who = f"{lanes.label}, rank {timeline.rank}"
    began = max(timeline.communication_began, 0.0)
    pieces = (
        (0.0, timeline.forward, "forward", 1.0, "forward"),
        (timeline.forward, timeline.compute, "backward", 1.0, "backward"),
        (min(began, timeline.compute), timeline.compute, lanes.style.fill, _HIDDEN, "hidden"),
        (max(began, timeline.compute), timeline.ended, lanes.style.fill, 1.0, "exposed"),
    )
    parts = [text(LEFT, y + 12, f"rank {timeline.rank}", size=11)]
    for index, (start, end, class_, opacity, what) in enumerate(pieces):
        if end <= start or (index >= 2 and not timeline.communication):
            continue
        hint = f"{who}: {what} {human_time(end - start)}"
        x, width = scale(start), scale(end) - scale(start)
        lane = y if index < 2 else y + _LANE + 1
        parts.append(rect(x, lane, width, _LANE, class_, hint=hint, fill_opacity=opacity))
    return "".join(parts)
