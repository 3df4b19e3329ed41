"""The collectives' race for people (rich, markdown) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from race.cases import BUSY, COMPUTE, Case
from race.exercises import ALL_REDUCE, BARE, COPIED, GLOO, OPENMPI, PERSISTENT, SYMMETRIC
from race.report import markdown_head, provenance
from race.stats import Ratio, compare, complete_rounds
from race.targets import CORES, MET, MISSED, target, verdict

SCHEMA_VERSION = 1
BUSY_LOAD = 0.5  # of a core
STYLES = {MET: "green", MISSED: "red"}
OURS = (SYMMETRIC, COPIED, PERSISTENT)
ALL_REDUCE_COLUMNS = (
    "size", "contender", "time", "× gloo (95 %)", "target", "× OpenMPI (95 %)", "target",
    "of the bare limit (95 %)", "target",
)  # fmt: skip
OTHER_COLUMNS = ("collective", "size", "gloo", "gradsync", "× gloo (95 %)", "target")
BUSY_COLUMNS = (
    "size", "contender", "step", "× gloo (95 %)", "CPU a step, all ranks",
    "gloo's CPU / its (95 %)", "CPU beyond computing",
)  # fmt: skip
LEGEND = (
    "time: of one call, the slowest rank's, median over the rounds. × gloo, × OpenMPI: their time "
    "/ ours, paired in each round, median; above 1 is faster. Ours averages, gloo and OpenMPI only "
    "sum. Of the bare limit: time of the reduction alone / ours. A target is met when the whole "
    "interval is, and open when it lies within."
)
BUSY_LEGEND = (
    "Beside the ranks, every core has a process that computes all the time. A step: compute, "
    "start an all-reduce, compute, wait; in turn one rank is late. CPU: user and system time of "
    "all ranks together."
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    contender: str
    ratio: Ratio
    target: float | None
    verdict: str | None


def comparisons(case: Case) -> list[Comparison]:
    """Our contenders with each of the others, on the rounds that all finished."""
    times = complete_rounds(case.seconds)
    found = []
    for ours in OURS:
        for versus in (GLOO, OPENMPI, BARE):
            if ours not in times or versus not in times or (ours == PERSISTENT and versus != BARE):
                continue  # without torch's call in front: compared with what has none either
            ratio = compare(times, ours, versus)
            wanted = target(case.operation, ours, versus, case.world, case.bytes)
            if case.operation == BUSY:
                wanted = None
            found.append(
                Comparison(
                    contender=ours,
                    ratio=ratio,
                    target=wanted,
                    verdict=verdict(ratio.spread, wanted) if wanted else None,
                )
            )
    return found


def cpu_ratios(case: Case) -> dict[str, Ratio]:
    """Busy: gloo's CPU time / the contender's; above 1 is cheaper."""
    cpu = complete_rounds(case.cpu_seconds)
    if GLOO not in cpu:
        return {}
    return {name: compare(cpu, name, GLOO) for name in OURS if name in cpu}


def document(
    settings: dict[str, Any], cases: Sequence[Case], notes: Sequence[str], *, interrupted: bool
) -> dict[str, Any]:
    """The JSON document. Seconds and bytes throughout; the comparisons follow from the rounds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "collectives",
        **provenance(),
        "settings": settings,
        "notes": list(notes),
        "interrupted": interrupted,
        "cases": [
            asdict(case)
            | {
                "comparisons": [asdict(each) for each in comparisons(case)],
                "cpu_ratios": {name: asdict(ratio) for name, ratio in cpu_ratios(case).items()},
            }
            for case in cases
        ],
    }


# ------------------------------------------------------------------------- tables


def print_tables(console: Console, cases: Sequence[Case], notes: Sequence[str]) -> None:
    for title, columns, rows in _tables(cases):
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(_styled(cell) for cell in row))
        console.print(table)
    for line in _footer(cases, notes):
        console.print(line)


def markdown(cases: Sequence[Case], notes: Sequence[str]) -> str:
    lines: list[str] = []
    for title, columns, rows in _tables(cases):
        lines += [f"**{title}**", "", *markdown_head(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *_footer(cases, notes)])


def _tables(
    cases: Sequence[Case],
) -> Iterable[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    measured = [case for case in cases if complete_rounds(case.seconds)]
    for kind, columns, cells in (
        (ALL_REDUCE, ALL_REDUCE_COLUMNS, _all_reduce_rows),
        (BUSY, BUSY_COLUMNS, _busy_rows),
        ("others", OTHER_COLUMNS, _other_rows),
    ):
        chosen = [case for case in measured if _kind(case) == kind]
        for world, group in groupby(chosen, key=lambda case: case.world):
            name = "other collectives, any tensor" if kind == "others" else kind
            rows = [row for case in group for row in cells(case)]
            yield f"{name}, float32, {world} ranks", columns, rows


def _kind(case: Case) -> str:
    return case.operation if case.operation in (ALL_REDUCE, BUSY) else "others"


def _all_reduce_rows(case: Case) -> list[tuple[str, ...]]:
    found = {(each.contender, each.ratio.versus): each for each in comparisons(case)}
    rows = []
    for name, seconds in complete_rounds(case.seconds).items():
        cells = [human_size(case.bytes), name, human_time(median(seconds))]
        for versus in (GLOO, OPENMPI, BARE):
            if name in OURS and name != PERSISTENT and versus not in case.seconds:
                cells += [f"no {versus}", ""]
            else:
                cells += _compared(found.get((name, versus)), is_share=versus == BARE)
        rows.append(tuple(cells))
    return rows


def _other_rows(case: Case) -> list[tuple[str, ...]]:
    times = complete_rounds(case.seconds)
    found = {each.ratio.versus: each for each in comparisons(case)}
    both = (human_time(median(times[name])) if name in times else "" for name in (GLOO, COPIED))
    size = human_size(case.bytes) if case.bytes else "–"
    return [(case.operation, size, *both, *_compared(found.get(GLOO)))]


def _busy_rows(case: Case) -> list[tuple[str, ...]]:
    found = {each.contender: each for each in comparisons(case) if each.ratio.versus == GLOO}
    cpu, ratios = complete_rounds(case.cpu_seconds), cpu_ratios(case)
    idle = median(cpu[COMPUTE]) if COMPUTE in cpu else None
    return [
        (
            human_size(case.bytes),
            name,
            human_time(median(seconds)),
            _compared(found.get(name))[0],
            human_time(median(cpu[name])),
            _interval(ratios[name]) if name in ratios else "",
            "" if idle is None or name == COMPUTE else human_time(median(cpu[name]) - idle),
        )
        for name, seconds in complete_rounds(case.seconds).items()
    ]


def _compared(comparison: Comparison | None, *, is_share: bool = False) -> tuple[str, str]:
    if comparison is None:
        return "", ""
    shown = _interval(comparison.ratio, is_share=is_share)
    if comparison.target is None:
        return shown, "–"
    wanted = f"{comparison.target:.0%}" if is_share else f"{comparison.target:g}"
    return shown, f"{wanted} {comparison.verdict}"


def _interval(ratio: Ratio, *, is_share: bool = False) -> str:
    values = (ratio.median, ratio.spread.low, ratio.spread.high)
    middle, low, high = (f"{value:.0%}" if is_share else f"{value:.3g}" for value in values)
    return f"{middle} ({low}..{high})"


def _styled(cell: str) -> str:
    style = STYLES.get(cell.rpartition(" ")[2])
    return f"[{style}]{cell}[/]" if style else cell


def _footer(cases: Sequence[Case], notes: Sequence[str]) -> list[str]:
    wrong = [
        f"{case.operation}, {case.world} ranks, {human_size(case.bytes)}: {name} did not give "
        "the right result; its times do not count"
        for case in cases
        for name, is_right in case.is_right.items()
        if not is_right
    ]
    stopped = [
        f"{case.operation}, {case.world} ranks, {human_size(case.bytes)}: stopped after "
        f"{min((len(seconds) for seconds in case.seconds.values()), default=0)} rounds"
        for case in cases
        if not case.complete
    ]
    legend = BUSY_LEGEND if any(case.operation == BUSY for case in cases) else LEGEND
    return [*wrong, *stopped, *notes, legend]


def notes_on_machine(cores: int, load: float) -> list[str]:
    """What keeps the numbers from counting, if anything does. `load`: before the race."""
    notes = []
    if cores != CORES:
        notes.append(f"The targets are for {CORES} cores; here there are {cores}.")
    if load > BUSY_LOAD * cores:
        notes.append(
            f"Others used this machine when the race began (load {load:.1f} on {cores} cores): "
            "its ratios do not count, run it again when it is quiet."
        )
    return notes


def human_size(size: int) -> str:
    for unit, factor in (("MB", 1024**2), ("kB", 1024)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def human_time(seconds: float) -> str:
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms"
