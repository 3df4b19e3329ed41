"""``gradsync diff``: two files, case by case.

[Note: identity]
A case of one file is compared with the case of the other that has the same model, batch size and
number of ranks (a collective: the same name, bytes and ranks), and the same implementation,
backend, type, hook, bucket size and threads. A setting of this second kind that has one value
throughout the first file and another one throughout the second is what the user wants to compare:
it is named in the header, and does not keep cases apart. So two runs on two backends can be
compared, and a file of torch's benchmark.py with a run of gradsync alone.

[Note: two runs]
The files are two runs, at two times: nothing cancels out, and the interval of the ratio does not
know what else the machine did. It is for one machine, kept quiet. A comparison that holds on a
noisy machine is one run in which both take turns, as ``gradsync bench`` does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from gradsync import ArgumentError
from gradsync.bench.result import NO_DDP, Case, CommCase, Result
from gradsync.bench.stats import SLOWER, change_percent, percentile, ratio_of_medians
from gradsync.bench.tables import Column, Row, Sheet, human_size, human_time, ratio_cells

AnyCase = Case | CommCase

PERCENTS: Final = (75, 95)  # as in torch's diff.py
_ALWAYS: Final = (("model", "batch_size", "world"), ("collective", "bytes", "world"))
_UNLESS_CONSTANT: Final = (
    "implementation", "backend", "dtype", "comm_hook", "bucket_cap_mb", "threads",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A case in both files."""

    before: AnyCase
    after: AnyCase


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two files side by side."""

    header: list[Row]  # key, baseline, test
    rows: list[Row]  # of the pairs; seconds and per cent
    only_before: list[str]
    only_after: list[str]

    def slower_than(self, percent: float) -> list[Row]:
        """The rows whose median is slower by more than that, and surely slower."""
        return [
            row for row in self.rows if row["verdict"] == SLOWER and row["median_change"] < -percent
        ]


def compare(before: Result, after: Result) -> Comparison:
    """Match the cases of two results and compare them.

    >>> fast, slow = (
    ...     Case(model="m", batch_size=8, ranks=(0, 1), implementation="torch", measurements=times)
    ...     for times in ((1.0, 1.1) * 10, (2.0, 2.1) * 10)
    ... )
    >>> (row,) = compare(Result(cases=[slow]), Result(cases=[fast])).rows
    >>> row["verdict"], round(row["p75_change"])
    ('faster', 48)
    """
    pairs, only_before, only_after, differing = match(_measured(before), _measured(after))
    return Comparison(
        header=_header(before, after, differing),
        rows=sorted((_row(pair) for pair in pairs), key=_by_title(pairs)),
        only_before=[describe(case) for case in only_before],
        only_after=[describe(case) for case in only_after],
    )


def _by_title(pairs: Sequence[Pair]) -> Callable[[Row], tuple[int, int]]:
    """Together what has one title, in the order in which the titles come first; then by ranks."""
    titles = list(dict.fromkeys(_title(pair.after) for pair in pairs))
    return lambda row: (titles.index(row["title"]), row["ranks"])


def match(
    before: Sequence[AnyCase], after: Sequence[AnyCase]
) -> tuple[list[Pair], list[AnyCase], list[AnyCase], dict[str, tuple[Any, Any]]]:
    """Pairs, what is only in one, and the settings that set the two apart as a whole."""
    differing = {
        name: (first, second)
        for name in _UNLESS_CONSTANT
        if (first := _constant(before, name)) is not _VARIES
        and (second := _constant(after, name)) is not _VARIES
        and first != second
    }
    kept = tuple(name for name in _UNLESS_CONSTANT if name not in differing)
    old, new = _by_identity(before, kept), _by_identity(after, kept)
    return (
        [Pair(before=old[key], after=new[key]) for key in old if key in new],
        [old[key] for key in old if key not in new],
        [new[key] for key in new if key not in old],
        differing,
    )


def share_cases(before: Result, after: Result) -> bool:
    """Is there a case that both have measured?

    >>> share_cases(Result(), Result())
    False
    """
    pairs, *_ = match(_measured(before), _measured(after))
    return bool(pairs)


def sheets_of(comparison: Comparison) -> list[Sheet]:
    """The comparison for people: the header, the cases, what has no counterpart."""
    header = Sheet(
        title="baseline and test",
        columns=(
            Column(key="key", title=""),
            Column(key="baseline", title="baseline"),
            Column(key="test", title="test"),
        ),
        rows=comparison.header,
    )
    sheets = [header]
    for title, group in groupby(comparison.rows, key=lambda row: str(row["title"])):
        sheets += [Sheet(title=title, columns=COLUMNS, rows=list(group))]
    if not comparison.rows:
        sheets.append(Sheet(title="no case is in both files", columns=(), rows=[]))
    for name, cases in (("baseline", comparison.only_before), ("test", comparison.only_after)):
        if cases:
            column = Column(key="case", title="case")
            rows = [{"case": case} for case in cases]
            sheets.append(Sheet(title=f"only in the {name}", columns=(column,), rows=rows))
    notes = (
        "Times and examples a second (all ranks together) are the test's; changes are in per "
        "cent of the baseline's time, faster is positive. ratio: median of the baseline / median "
        "of the test, with its 95 % bootstrap interval.",
    )
    return [*sheets, Sheet(title="", columns=(), rows=[], notes=notes)]


def parse_percent(text: str) -> float:
    """A limit as people write it.

    >>> parse_percent("5%"), parse_percent("2.5")
    (5.0, 2.5)
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentError(f"{text!r} is not a percentage of 0 or more, as in 5%")
    return value


def describe(case: AnyCase) -> str:
    """One line that names the case."""
    ranks = "1 rank" if case.world == 1 else f"{case.world} ranks"
    if isinstance(case, CommCase):
        return f"{case.collective}, {human_size(case.bytes)}, {ranks}, {case.backend}"
    return f"{case.model}, batch size {case.batch_size}, {ranks}, {case.label}, {case.dtype}"


def _measured(result: Result) -> list[AnyCase]:
    """Those with times that count."""
    cases = [case for case in result.cases if case.measurements and case.error is None]
    comm = [case for case in result.comm_cases if case.seconds and case.error is None]
    return [*cases, *comm]


def _header(before: Result, after: Result, differing: dict[str, tuple[Any, Any]]) -> list[Row]:
    """What describes the runs as a whole; of the machine's facts only those that are short."""

    def facts(result: Result) -> dict[str, Any]:
        short = ("pytorch_version", "cuda_version", "distributed_backend", "bucket_size", "created")
        machine = {k: v for k, v in result.header.items() if k not in ("torch", "cuda", "topology")}
        own = {name: getattr(result, name) for name in (*short, "status", "command")}
        return own | machine

    old, new = facts(before), facts(after)
    old |= {name: values[0] for name, values in differing.items()}
    new |= {name: values[1] for name, values in differing.items()}
    keys = sorted(old.keys() | new.keys())
    rows = [
        {"key": key, "baseline": _text(old.get(key)), "test": _text(new.get(key))} for key in keys
    ]
    if before.header.get("topology") != after.header.get("topology"):
        rows.append({"key": "topology", "baseline": "differs", "test": "differs"})
    return rows


def _text(value: object) -> str:
    return "-" if value in (None, "", []) else str(value)


def _row(pair: Pair) -> Row:
    before, after = pair.before, pair.after
    old, new = _times(before), _times(after)
    row: Row = {"title": _title(after), "ranks": after.world, "case": _case_text(before, after)}
    for percent in PERCENTS:
        was, now = percentile(old, percent), percentile(new, percent)
        row[f"p{percent}_baseline"], row[f"p{percent}"] = was, now
        if isinstance(after, Case):
            row[f"p{percent}_examples_per_second"] = after.examples_per_second(percent)
        row[f"p{percent}_change"] = change_percent(was, now)
    row["median_change"] = change_percent(percentile(old, 50), percentile(new, 50))
    ratio = ratio_of_medians(before.by_round(), after.by_round())
    return row | ratio_cells(ratio)


def _title(case: AnyCase) -> str:
    if isinstance(case, CommCase):
        return f"{case.collective}, {human_size(case.bytes)}"
    return f"{case.model} with batch size {case.batch_size}"


def _case_text(before: AnyCase, after: AnyCase) -> str:
    old, new = (
        case.backend if isinstance(case, CommCase) else case.label for case in (before, after)
    )
    return new if old == new else f"{old} → {new}"


def _times(case: AnyCase) -> Sequence[float]:
    return case.measurements if isinstance(case, Case) else case.seconds


_VARIES: Final = object()


def _constant(cases: Sequence[AnyCase], name: str) -> Any:
    """The one value that all cases have; cases without DDP have none to speak of."""
    synced = [case for case in cases if getattr(case, "implementation", None) != NO_DDP]
    values = {getattr(case, name) for case in synced if hasattr(case, name)}
    return values.pop() if len(values) == 1 else _VARIES


def _by_identity(cases: Sequence[AnyCase], kept: Sequence[str]) -> dict[tuple[Any, ...], AnyCase]:
    found: dict[tuple[Any, ...], AnyCase] = {}
    for case in cases:
        always: tuple[str, ...] = _ALWAYS[isinstance(case, CommCase)]
        # Without DDP only that is left which a lone process has.
        names = kept
        if isinstance(case, Case) and case.implementation == NO_DDP:
            names = [name for name in kept if name in ("dtype", "threads")]
            always = (*always, "implementation")
        key = tuple((name, getattr(case, name, None)) for name in (*always, *names))
        found[key] = case  # of two that are the same, the later
    return found


def _change(value: float) -> str:
    return f"{value:+.1f} %"


COLUMNS: Final = (
    Column(key="ranks", title="ranks", names_row=True),
    Column(key="case", title="case", names_row=True),
    *(
        column
        for percent in PERCENTS
        for column in (
            Column(key=f"p{percent}", title=f"p{percent}", show=human_time),
            Column(
                key=f"p{percent}_examples_per_second",
                title="ex/s",
                show=lambda value: f"{value:.1f}",
            ),
            Column(key=f"p{percent}_change", title="diff", show=_change),
        )
    ),
    Column(key="ratio", title="ratio", show=lambda value: f"{value:.3f}"),
    Column(key="interval", title="95 %"),
    Column(key="verdict", title="verdict"),
)
