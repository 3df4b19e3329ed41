"""``gradsync report``: results of any number of files as one page, or as pictures.

Data become figures, figures a page: ``data`` sorts the cases of the files; ``figures`` decides
which plots there are, and ``lines``, ``bars``, ``spread`` and ``timeline`` draw them, with
``frame``, ``scales``, ``colours`` and ``svg``; ``page`` puts them and the tables into one file, and
``png`` each of them into a file of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradsync import ArgumentError
from gradsync.bench import files
from gradsync.bench.report import png
from gradsync.bench.report.data import collect
from gradsync.bench.report.page import Page

TITLE: Final = "gradsync report"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written."""

    page: Path
    pngs: tuple[Path, ...]
    figures: int  # on the page


def write_report(
    paths: Sequence[Path], output: Path, *, pngs: Path | None = None, title: str = TITLE
) -> Report:
    """Read the files, write the page, and the plots as PNG files if a folder for them is given."""
    _check_output(paths, output)
    if pngs is not None:
        png.load()  # before any work: it may not be installed
    page = Page(collect([(path, files.read(path)) for path in paths]), title)
    files.replace(output, page.html().encode())
    written = [] if pngs is None else png.write_pngs(page.figures, pngs)
    return Report(page=output, pngs=tuple(written), figures=len(page.figures))


def _check_output(paths: Sequence[Path], output: Path) -> None:
    if not output.parent.is_dir():
        raise ArgumentError(f"-o {output}: there is no folder {output.parent}")
    if output.is_dir():
        raise ArgumentError(f"-o {output}: this is a folder; name a file, as {output}/report.html")
    if output.exists() and any(path.exists() and path.samefile(output) for path in paths):
        raise ArgumentError(f"-o {output}: this is one of the results, and would be overwritten")
