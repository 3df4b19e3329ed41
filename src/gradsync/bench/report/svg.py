"""The pieces of a drawing as SVG text, and a figure, which is one drawing with its words.

Colours are classes here (``colours.py`` gives them their values), so that one drawing serves the
light page, the dark page and the PNG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 440  # of every figure: a phone shows it nearly as large as it is drawn
MARGIN: Final = 10  # around a figure in a file of its own
FONT: Final = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', "
    "'DejaVu Sans', sans-serif"
)
_NARROW: Final = frozenset("ijlt.,:;|!/'·()[] ")
_WIDE: Final = frozenset("mwMWABCDEFGHKNOPQRSTUVXYZ×%…")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot: its drawing, what it is called, and what it says in words."""

    name: str  # of its file and its place on the page
    title: str
    subtitle: str
    says: str  # one sentence
    numbers: str  # the same in full, for those who cannot see it
    height: float
    body: str  # SVG elements


def inline(figure: Figure) -> str:
    """The drawing inside a page, which brings the colours."""
    return tag(
        "svg",
        tag("title", escape(f"{figure.title}, {figure.subtitle}"), id=f"{figure.name}-title"),
        tag("desc", escape(f"{figure.says} {figure.numbers}".strip()), id=f"{figure.name}-desc"),
        figure.body,
        role="img",
        viewBox=f"0 0 {WIDTH} {figure.height:g}",
        aria_labelledby=f"{figure.name}-title {figure.name}-desc",
    )


def standalone(figure: Figure, css: str) -> str:
    """The drawing as a file of its own, with its colours and a background."""
    return tag(
        "svg",
        tag("style", css),
        rect(-MARGIN, -MARGIN, WIDTH + 2 * MARGIN, figure.height + 2 * MARGIN, "surface"),
        figure.body,
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH + 2 * MARGIN,
        height=figure.height + 2 * MARGIN,
        viewBox=f"{-MARGIN} {-MARGIN} {WIDTH + 2 * MARGIN} {figure.height + 2 * MARGIN:g}",
        font_family=FONT,
    )


def tag(name: str, *children: str, **attributes: str | float | None) -> str:
    """An element. Its children are SVG already: text in them has been escaped.

    >>> tag("line", x1=0, x2=1.23456, stroke_width=2, class_="axis", id=None)
    '<line x1="0" x2="1.23" stroke-width="2" class="axis"/>'
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else f"{round(value, 2):g}"
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    start = " ".join(parts)
    return f"<{start}>{''.join(children)}</{name}>" if children else f"<{start}/>"


def text(
    x: float, y: float, words: str, class_: str = "muted", *, size: float = 12, anchor: str = ""
) -> str:
    """Words at a place, which is their left end unless ``anchor`` says "middle" or "end".

    >>> text(1, 2, "a < b")
    '<text x="1" y="2" class="muted" font-size="12">a &lt; b</text>'
    """
    return tag(
        "text", escape(words), x=x, y=y, class_=class_, font_size=size, text_anchor=anchor or None
    )


def rect(
    x: float, y: float, width: float, height: float, class_: str, *, hint: str = "", **more: float
) -> str:
    """A rectangle; ``hint`` is shown by a mouse that rests on it."""
    children = (tag("title", escape(hint)),) if hint else ()
    return tag(
        "rect", *children, x=x, y=y, width=max(width, 0), height=height, class_=class_, **more
    )


def line(
    x1: float, y1: float, x2: float, y2: float, class_: str, *, width: float = 1, dash: str = ""
) -> str:
    """A straight line."""
    return tag(
        "line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, stroke_width=width,
        stroke_dasharray=dash or None,
    )  # fmt: skip


def path(
    points: Sequence[tuple[float, float]], class_: str, *, width: float = 2, dash: str = ""
) -> str:
    """A line through points."""
    places = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag(
        "path", d=f"M{places}", class_=f"{class_} open", stroke_width=width,
        stroke_dasharray=dash or None,
    )  # fmt: skip


def marker(x: float, y: float, shape: int, class_: str, *, hint: str = "", size: float = 4) -> str:
    """A small mark; the shape, like the colour, tells the series."""
    children = (tag("title", escape(hint)),) if hint else ()
    outlines = {
        1: ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        2: ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
        3: ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
        4: ((0, 1.3), (1.2, -0.9), (-1.2, -0.9)),
    }
    if shape % 5 == 0:
        return tag("circle", *children, cx=x, cy=y, r=size, class_=class_)
    corners = (f"{x + dx * size:.1f} {y + dy * size:.1f}" for dx, dy in outlines[shape % 5])
    return tag("path", *children, d=f"M{'L'.join(corners)}Z", class_=class_)


def text_width(words: str, size: float = 12) -> float:
    """About how wide words are; fonts differ, so rather more than less.

    >>> text_width("torch") < text_width("gradsync") < text_width("gradsync", 13)
    True
    """
    shares = (0.36 if c in _NARROW else 0.76 if c in _WIDE else 0.6 for c in words)
    return size * sum(shares)


def fitted(words: str, room: float, size: float = 12) -> str:
    """The words, cut where they would not fit.

    >>> fitted("short", 100), fitted("much too long for that", 60)
    ('short', 'much to…')
    """
    if text_width(words, size) <= room:
        return words
    while words and text_width(words + "…", size) > room:
        words = words[:-1]
    return words.rstrip() + "…"
