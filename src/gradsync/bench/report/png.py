"""Plots as PNG files, for READMEs. resvg draws them: one wheel, without a browser or cairo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from gradsync import UsageError
from gradsync.bench import files
from gradsync.bench.report.colours import LIGHT, css
from gradsync.bench.report.svg import Figure, standalone

ZOOM: Final = 2.0  # pixels for each unit of a drawing: sharp on dense screens
_WORDS: Final = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'


class PngError(UsageError):
    """What is missing to draw PNG files, and how to get it."""


def write_pngs(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """A file for each figure, named after it; the folder is made if need be."""
    resvg = load()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PngError(f"--png {folder}: cannot be made: {error.strerror}") from error
    paths = []
    for figure in figures:
        drawn = resvg.svg_to_bytes(svg_string=standalone(figure, css(LIGHT)), zoom=ZOOM)
        paths.append(folder / f"{figure.name}.png")
        files.replace(paths[-1], bytes(drawn))
    return paths


def load() -> ModuleType:
    """resvg, if it is installed and finds a font; else a ``PngError`` that says what to do."""
    try:
        import resvg_py
    except ImportError as error:
        raise PngError(
            "PNG files need resvg-py, which is not installed: pip install 'gradsync[bench]'"
        ) from error
    words = _WORDS.format('<text y="15" font-family="Arial, sans-serif">W</text>')
    if resvg_py.svg_to_bytes(svg_string=words) == resvg_py.svg_to_bytes(
        svg_string=_WORDS.format("<g/>")
    ):
        raise PngError("PNG files need a font, and there is none: install one, as fonts-dejavu")
    module: ModuleType = resvg_py
    return module
