"""The table of ``gradsync bench hybrid``: percentiles of an epoch, for each trainer and for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gradsync.bench.result import PERCENTS, Case, Result
from gradsync.bench.stats import Ratio, percentile, ratio_of_medians
from gradsync.bench.tables import Column, Row, Sheet, human_time, ratio_cells
from gradsync.bench.tables import sheets_of as other_sheets_of

ALL: Final = "all"


def sheets_of(result: Result) -> list[Sheet]:
    """A sheet for what was measured, and one for what failed.

    Trainers may have different numbers of epochs: those of all are pooled, not added up.

    >>> case = Case(
    ...     model="hybrid", batch_size=70, implementation="gradsync", ranks=(0, 1),
    ...     measurements=(0.1, 0.1, 0.4), steps_by_rank=(2, 1),
    ... )
    >>> [(row["who"], row["epochs"], row["p50"]) for row in sheets_of(Result(cases=[case]))[0].rows]
    [('trainer0', 2, 0.1), ('trainer1', 1, 0.4), ('all', 3, 0.1)]
    """
    measured = [case for case in result.cases if case.measurements]
    models = dict.fromkeys((case.model, case.world) for case in measured)
    sheets = [_sheet([c for c in measured if (c.model, c.world) == model]) for model in models]
    return sheets + other_sheets_of(replace(result, cases=_without_times(result.failed)))


def _without_times(failed: Sequence[object]) -> list[Case]:
    return [
        replace(case, measurements=(), steps_by_round=(), steps_by_rank=())
        for case in failed
        if isinstance(case, Case)
    ]


def _sheet(cases: Sequence[Case]) -> Sheet:
    first = cases[0]
    trainers = "1 trainer" if first.world == 1 else f"{first.world} trainers"
    size = "" if first.parameters is None else f"; {first.parameters:,} parameters"
    rows: list[Row] = []
    notes = []
    for case in cases:
        ratio = None
        if case is not first and case.error is None and first.error is None:
            ratio = ratio_of_medians(first.by_round(), case.by_round(), paired=True)
            notes.append(_sentence(case, first, ratio))
        rows += _rows(case, ratio)
    if any(not case.complete for case in cases):
        notes.append("*: stopped before its last round.")
    title = f"{first.model}, {trainers}; an epoch has about {first.batch_size} bags a trainer{size}"
    return Sheet(title=title, columns=_COLUMNS, rows=rows, notes=notes)


def _rows(case: Case, ratio: Ratio | None) -> list[Row]:
    by_rank = zip(case.ranks, case.by_rank(), strict=True)
    everyone = [(f"trainer{rank}", seconds) for rank, seconds in by_rank]
    return [
        {
            "model": case.model,
            "trainers": case.world,
            "case": case.label + ("" if case.complete else "*"),
            "who": who,
            "epochs": len(seconds),
            **{f"p{percent}": percentile(seconds, percent) for percent in PERCENTS},
            "epochs_per_second": 1 / percentile(seconds, 50),
            **ratio_cells(ratio if who == ALL else None),
        }
        for who, seconds in [*everyone, (ALL, case.measurements)]
        if seconds
    ]


def _sentence(case: Case, first: Case, ratio: Ratio) -> str:
    interval = ""
    if ratio.low is not None and ratio.high is not None:
        interval = f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    return (
        f"{case.label} has {ratio.value:.2f} times the epochs a second of {first.label}{interval}, "
        f"by the medians of one run in which they took turns: {ratio.verdict}."
    )


_COLUMNS: Final = (
    Column(key="case", title="case", names_row=True),
    Column(key="who", title="", names_row=True),
    Column(key="epochs", title="epochs"),
    *(Column(key=f"p{percent}", title=f"p{percent}", show=human_time) for percent in PERCENTS),
    Column(key="epochs_per_second", title="epochs/s", show=lambda value: f"{value:.1f}"),
    Column(key="ratio", title="ratio", show=lambda value: f"{value:.3f}"),
    Column(key="interval", title="95 %"),
    Column(key="verdict", title="verdict"),
)
