"""Who has which colour and mark: the same in all plots of a page.

[Note: colours]
Each series has a mark of its own shape too, so that nobody has to tell two hues apart.
tests/bench/test_report_drawing.py holds the colours against the page (a contrast of 3 at least)
and the usual ones against each other as colour-blind eyes see them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gradsync.bench.report.svg import FONT
from gradsync.bench.result import NO_DDP


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of the drawings, on a light or on a dark page."""

    surface: str
    ink: str
    muted: str
    grid: str
    axis: str
    forward: str
    backward: str
    none: str  # of "no DDP", and of what is ideal
    series: tuple[str, ...]


LIGHT: Final = Theme(
    surface="#ffffff",
    ink="#16202c",
    muted="#566273",
    grid="#e4e8ee",
    axis="#98a3b1",
    forward="#c3ccd8",
    backward="#8f9cad",
    none="#747f8d",
    series=("#0a5ca8", "#2b9cc9", "#d25400", "#7a0f3c", "#0b8a5c", "#9a7800", "#5b4bd6", "#c2479b"),
)
DARK: Final = Theme(
    surface="#161c25",
    ink="#e9edf3",
    muted="#a4b0c0",
    grid="#2a3340",
    axis="#5c6979",
    forward="#4a5769",
    backward="#75849a",
    none="#98a3b2",
    series=("#4c96e8", "#9adcf5", "#ff8b3d", "#e05a8a", "#35b588", "#f4e27a", "#9c90ff", "#ffb3d9"),
)
SLOTS: Final = len(LIGHT.series)

# The usual ones keep their colour whoever else is there. In a plot of collectives the backends
# have the colours of the classes that use them.
_OWN: Final = {
    "torch": 0, "gloo": 0, "reference": 0, "torch-tuned": 1, "gradsync": 2, "gradsync-tuned": 3,
}  # fmt: skip
_DASHES: Final = ("", "7 4", "12 4 4 4", "4 2")


@dataclass(frozen=True, kw_only=True)
class Style:
    """Of one series."""

    slot: str  # a number, or "none"
    shape: int

    @property
    def fill(self) -> str:
        """The class that fills."""
        return f"f{self.slot}"

    @property
    def stroke(self) -> str:
        """The class that draws lines."""
        return f"s{self.slot}"


def styles_of(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, as ``torch/gloo`` or ``gloo``; in the order given.

    >>> styles = styles_of(["torch/gloo", "gradsync/gloo", "none", "gradsync/gradsync"])
    >>> [style.slot for style in styles.values()]
    ['0', '2', 'none', '4']
    """
    styles: dict[str, Style] = {}
    names = list(dict.fromkeys(labels))
    taken = {_OWN[name.split("/")[0]] for name in names if name.split("/")[0] in _OWN}
    free = [slot for slot in range(SLOTS) if slot not in taken and slot > 3]
    free += [slot for slot in range(SLOTS) if slot not in taken and slot <= 3]
    used: set[int] = set()
    for name in names:
        first = name.split("/")[0]
        if first == NO_DDP:
            styles[name] = Style(slot="none", shape=0)
            continue
        slot = _OWN.get(first)
        if slot is None or slot in used:
            slot = free.pop(0) if free else len(styles) % SLOTS
        used.add(slot)
        styles[name] = Style(slot=str(slot), shape=slot)
    return styles


def dash_of(place: int) -> str:
    """The dashes of a run's lines, by its place among the runs of a plot: the first has none."""
    return _DASHES[place % len(_DASHES)]


def css(theme: Theme) -> str:
    """The classes that drawings use."""
    rules = [
        f".surface{{fill:{theme.surface}}}",
        f".ink{{fill:{theme.ink}}}",
        f".muted{{fill:{theme.muted}}}",
        f".grid{{stroke:{theme.grid}}}",
        f".axis{{stroke:{theme.axis}}}",
        f".edge{{stroke:{theme.ink}}}",
        f".forward{{fill:{theme.forward}}}",
        f".backward{{fill:{theme.backward}}}",
        ".open{fill:none;stroke-linejoin:round}",
        ".bold{font-weight:600}",
        f"text{{font-family:{FONT}}}",
    ]
    for slot, colour in (*enumerate(theme.series), ("none", theme.none)):
        rules.append(f".f{slot}{{fill:{colour}}}.s{slot}{{stroke:{colour}}}")
    return "\n".join(rules)
