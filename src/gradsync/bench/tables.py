"""Sheets: a title, columns and rows, and the ways to print them: rich, markdown, csv, json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradsync.bench.result import NO_DDP, PERCENTS, TORCH, Case, CommCase, Result
from gradsync.bench.stats import FASTER, SLOWER, Ratio, median, ratio_of_medians

STYLES: Final = {FASTER: "green", SLOWER: "red"}
WIDTH: Final = 180  # where the output is no terminal

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A key of the rows, its heading for people, and how they read its values."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    names_row: bool = False  # repeated where a table is too wide and goes on below


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Rows of plain values: programs get them as they are, people as the columns show them.

    >>> sheet = Sheet(
    ...     title="times", columns=(Column(key="p50", title="median", show=lambda v: f"{v} s"),),
    ...     rows=[{"p50": 2, "model": "mlp"}],
    ... )
    >>> print(markdown([sheet]))
    **times**
    <BLANKLINE>
    | median |
    |---|
    | 2 s |
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = field(default=())

    def cells(self, row: Row) -> list[str]:
        """What people read; an empty cell where there is no value."""
        return ["" if row.get(c.key) is None else c.show(row[c.key]) for c in self.columns]


# ------------------------------------------------------------------------- the ways to print


def print_rich(sheets: Sequence[Sheet], console: Console) -> None:
    """As tables in a terminal; what is too wide goes on below."""
    for sheet in sheets:
        if sheet.title:
            console.print(f"[bold]{escape(sheet.title)}[/]", highlight=False)
        for columns in _fit(sheet, console.width) if sheet.rows else []:
            table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
            for column in columns:
                table.add_column(column.title, overflow="fold")
            part = replace(sheet, columns=columns)
            for row in sheet.rows:
                style = STYLES.get(str(row.get("verdict")))
                table.add_row(*(escape(cell) for cell in part.cells(row)), style=style)
            console.print(table)
            console.print()
        for note in sheet.notes:
            console.print(escape(note), highlight=False)


def _fit(sheet: Sheet, width: int) -> list[list[Column]]:
    """The columns of each part, so that no part is wider than that if it can be helped."""
    cells = [[column.title for column in sheet.columns], *(sheet.cells(row) for row in sheet.rows)]
    widths = {
        column.key: max(len(cell) for cell in column_cells) + 3
        for column, column_cells in zip(sheet.columns, zip(*cells, strict=True), strict=True)
    }
    names = [column for column in sheet.columns if column.names_row]
    if not names:
        return [list(sheet.columns)]  # prose: it wraps
    taken = start = sum(widths[column.key] for column in names)
    parts = [list(names)]
    for column in sheet.columns:
        if column.names_row:
            continue
        if taken + widths[column.key] > width and len(parts[-1]) > len(names):
            parts.append(list(names))
            taken = start
        parts[-1].append(column)
        taken += widths[column.key]
    return parts


def markdown(sheets: Sequence[Sheet]) -> str:
    """For a README."""
    lines: list[str] = []
    for sheet in sheets:
        lines += [f"**{sheet.title}**", ""]
        if sheet.rows:
            lines.append("| " + " | ".join(column.title for column in sheet.columns) + " |")
            lines.append("|" + "---|" * len(sheet.columns))
        for row in sheet.rows:
            cells = (cell.replace("|", "\\|") for cell in sheet.cells(row))
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", *(f"{note}\n" for note in sheet.notes)]
    return "\n".join(lines).rstrip()


def csv_text(sheets: Sequence[Sheet]) -> str:
    """One table of all rows, with every key that any row has; numbers as they are."""
    rows = [row for sheet in sheets for row in sheet.rows]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip()


def json_text(sheets: Sequence[Sheet], **more: Any) -> str:
    """The rows of each sheet."""
    tables = [{"title": s.title, "rows": list(s.rows), "notes": list(s.notes)} for s in sheets]
    return json.dumps({**more, "tables": tables}, indent=1)


FORMATS: Final = ("table", "markdown", "csv", "json")


def show(sheets: Sequence[Sheet], how: str, **more: Any) -> None:
    """Print the sheets to standard output in one of ``FORMATS``."""
    if how == "table":
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)
        print_rich(sheets, console)
    elif how == "markdown":
        print(markdown(sheets))
    elif how == "csv":
        print(csv_text(sheets))
    else:
        print(json_text(sheets, **more))


# ------------------------------------------------------------------------- the sheets of a run


def sheets_of(result: Result) -> list[Sheet]:
    """All that a run measured: a sheet for each model, or one for the collectives; and failures."""
    cases = [case for case in result.cases if case.measurements]
    models = dict.fromkeys((case.model, case.batch_size, case.dtype) for case in cases)
    sheets = [
        _model_sheet([c for c in cases if (c.model, c.batch_size, c.dtype) == model])
        for model in models
    ]
    if timed := [case for case in result.comm_cases if case.seconds]:
        sheets.append(_comm_sheet(timed))
    if result.failed:
        sheets.append(_failures(result.failed))
    return sheets


def _model_sheet(cases: Sequence[Case]) -> Sheet:
    first = cases[0]
    size = "" if first.parameters is None else f", {first.parameters:,} parameters"
    hook = f", hook {first.comm_hook}" if first.comm_hook else ""
    references = {
        world: reference_of([c for c in cases if c.world == world]) for world in _worlds(cases)
    }
    names = dict.fromkeys(each.label for each in references.values() if each)
    notes = []
    if names:
        notes.append(
            f"ratio: median time of {' or '.join(names)} / this one's, of one run in which they "
            "took turns, with its 95 % bootstrap interval; above 1 is faster."
        )
    if any(not case.complete for case in cases):
        notes.append("*: stopped before its last round.")
    return Sheet(
        title=f"{first.model}: batch size {first.batch_size} a rank, {first.dtype}{hook}{size}",
        columns=_BENCH_COLUMNS,
        rows=[
            _bench_row(case, cases, references[case.world])
            for case in sorted(cases, key=lambda case: case.world)
        ],
        notes=notes,
    )


def _bench_row(case: Case, cases: Sequence[Case], reference: Case | None) -> Row:
    rate = case.examples_per_second()
    one = _find(cases, lambda c: c.world == 1 and c.series == case.series)
    no_ddp = _find(cases, lambda c: c.world == 1 and c.implementation == NO_DDP)
    ratio = None
    if reference is not None and reference is not case and case.error is None:
        ratio = ratio_of_medians(reference.by_round(), case.by_round(), paired=True)
    return {
        "model": case.model,
        "batch_size": case.batch_size,
        "dtype": case.dtype,
        "ranks": case.world,
        "case": case.label + ("" if case.complete else "*"),
        **{f"p{percent}": case.seconds(percent) for percent in PERCENTS},
        "examples_per_second": rate,
        "efficiency_of_1_rank": _efficiency(case, one),
        "efficiency_of_no_ddp": _efficiency(case, no_ddp),
        "exposed": case.exposed if case.backend else None,
        "peak_memory": max(case.peak_memory, default=None),
        **ratio_cells(ratio),
    }


def ratio_cells(ratio: Ratio | None) -> Row:
    """The cells of a ratio: value, both ends of the interval, verdict."""
    if ratio is None:
        return {"ratio": None, "ratio_low": None, "ratio_high": None, "verdict": None}
    return {
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "interval": human_interval(ratio),
        "verdict": ratio.verdict,
    }


def _efficiency(case: Case, base: Case | None) -> float | None:
    """Examples a second for each rank, as a share of the base's, which has one rank."""
    if base is None:
        return None
    return case.examples_per_second() / case.world / base.examples_per_second()


def reference_of(cases: Sequence[Case]) -> Case | None:
    """With whom the others are compared: torch's class, else the first with DDP."""
    synced = [case for case in cases if case.implementation != NO_DDP and case.error is None]
    return _find(synced, lambda case: case.implementation == TORCH) or _find(synced, bool)


def _find(cases: Sequence[Case], is_wanted: Callable[[Case], bool]) -> Case | None:
    return next((case for case in cases if is_wanted(case)), None)


def _worlds(cases: Sequence[Case]) -> list[int]:
    return list(dict.fromkeys(case.world for case in cases))


def _comm_sheet(cases: Sequence[CommCase]) -> Sheet:
    rows: list[Row] = []
    for case in cases:
        same = [c for c in cases if _comm_key(c) == _comm_key(case) and c.error is None]
        ratio = None
        if same and same[0] is not case and case.error is None:
            ratio = ratio_of_medians(same[0].by_round(), case.by_round(), paired=True)
        rows.append(
            {
                "collective": case.collective,
                "ranks": case.world,
                "bytes": case.bytes,
                "backend": case.backend + ("" if case.complete else "*"),
                "seconds": median(case.seconds),
                "algbw": case.algbw,
                "busbw": case.busbw,
                "correct": case.correct,
                **ratio_cells(ratio),
            }
        )
    return Sheet(
        title=f"collectives, {cases[0].dtype}",
        columns=_COMM_COLUMNS,
        rows=rows,
        notes=[
            "time: of one call on the slowest rank, median over the rounds. Bandwidths as "
            f"nccl-tests define them. ratio: time of {cases[0].backend} / this one's, with its "
            "95 % bootstrap interval; above 1 is faster."
        ],
    )


def _comm_key(case: CommCase) -> tuple[Any, ...]:
    return case.collective, case.world, case.bytes, case.dtype


def _failures(failed: Sequence[Case | CommCase]) -> Sheet:
    rows: dict[tuple[str, int, str], list[str]] = {}
    for case in failed:
        what = (
            case.model if isinstance(case, Case) else f"{case.collective} {human_size(case.bytes)}"
        )
        who = case.label if isinstance(case, Case) else case.backend
        rows.setdefault((what, case.world, str(case.error)), []).append(who)
    return Sheet(
        title="failed",
        columns=tuple(Column(key=key, title=key) for key in ("what", "ranks", "cases", "error")),
        rows=[
            {"what": what, "ranks": world, "cases": ", ".join(who), "error": error}
            for (what, world, error), who in rows.items()
        ],
    )


# ------------------------------------------------------------------------- units


def human_time(seconds: float) -> str:
    """In the unit that suits.

    >>> human_time(0.0123), human_time(4.2e-6), human_time(3.0)
    ('12.30 ms', '4.2 µs', '3.000 s')
    """
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 1 else f"{seconds:.3f} s"


def human_size(size: float) -> str:
    """In powers of 1024.

    >>> human_size(4096), human_size(3 * 2**20)
    ('4 kB', '3 MB')
    """
    for unit, factor in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:g} B"


def human_interval(ratio: Ratio) -> str:
    """Both ends.

    >>> human_interval(Ratio(value=1.2, low=1.1, high=1.3))
    '1.100..1.300'
    """
    if ratio.low is None or ratio.high is None:
        return ""
    return f"{ratio.low:.3f}..{ratio.high:.3f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


_RATIO_COLUMNS: Final = (
    Column(key="ratio", title="ratio", show=lambda value: f"{value:.3f}"),
    Column(key="interval", title="95 %"),
    Column(key="verdict", title="verdict"),
)
_BENCH_COLUMNS: Final = (
    Column(key="ranks", title="ranks", names_row=True),
    Column(key="case", title="case", names_row=True),
    *(Column(key=f"p{percent}", title=f"p{percent}", show=human_time) for percent in PERCENTS),
    Column(key="examples_per_second", title="ex/s", show=lambda value: f"{value:.1f}"),
    Column(key="efficiency_of_1_rank", title="of 1 rank", show=_share),
    Column(key="efficiency_of_no_ddp", title="of no ddp", show=_share),
    Column(key="exposed", title="exposed", show=human_time),
    Column(key="peak_memory", title="peak", show=human_size),
    *_RATIO_COLUMNS,
)
_COMM_COLUMNS: Final = (
    Column(key="collective", title="collective", names_row=True),
    Column(key="ranks", title="ranks", names_row=True),
    Column(key="bytes", title="size", show=human_size, names_row=True),
    Column(key="backend", title="backend", names_row=True),
    Column(key="seconds", title="time", show=human_time),
    Column(key="algbw", title="algbw GB/s", show=lambda value: f"{value:.3g}"),
    Column(key="busbw", title="busbw GB/s", show=lambda value: f"{value:.3g}"),
    *_RATIO_COLUMNS,
)
