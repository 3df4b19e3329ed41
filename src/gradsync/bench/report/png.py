"""Plots as PNG files, for READMEs. resvg draws them: one wheel, without a browser or cairo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gradsync import UsageError
from gradsync.bench import files
from gradsync.bench.report.colours import LIGHT, css
from gradsync.bench.report.svg import Figure, standalone

ZOOM: Final = 2.0  # pixels for each unit of a drawing: sharp on dense screens
# What may be there: the first that is found is taken.
SANS_SERIF: Final = (
    "Arial", "Helvetica", "Liberation Sans", "DejaVu Sans", "Noto Sans", "Open Sans", "Roboto",
    "Ubuntu", "Cantarell", "FreeSans",
)  # fmt: skip
_WORDS: Final = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'


class PngError(UsageError):
    """What is missing to draw PNG files, and how to get it."""


def write_pngs(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """A file for each figure, named after it; the folder is made if need be."""
    draw = load()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PngError(f"--png {folder}: cannot be made: {error.strerror}") from error
    paths = []
    for figure in figures:
        drawn = draw(svg_string=standalone(figure, css(LIGHT)), zoom=ZOOM)
        paths.append(folder / f"{figure.name}.png")
        files.replace(paths[-1], bytes(drawn))
    return paths


def load() -> Callable[..., bytes]:
    """What draws, if resvg is installed and finds a font; else a ``PngError`` that says what to do.

    resvg takes Arial for the font without serifs, unless it is told another one that is there.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise PngError(
            "PNG files need resvg-py, which is not installed: pip install 'gradsync[bench]'"
        ) from error
    words = _WORDS.format('<text y="15" font-family="sans-serif">W</text>')
    mute = resvg_py.svg_to_bytes(svg_string=_WORDS.format("<g/>"))
    for family in SANS_SERIF:
        draw = partial(resvg_py.svg_to_bytes, sans_serif_family=family)
        if draw(svg_string=words) != mute:
            return draw
    raise PngError(
        "PNG files need a font without serifs, and none is there that we know: install one, as "
        "fonts-dejavu"
    )
