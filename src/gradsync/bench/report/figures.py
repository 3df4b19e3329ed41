"""Which plots there are, and what each of them says in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gradsync.bench.report.bars import Bar, bar_plot
from gradsync.bench.report.data import CommGroup, Content, ModelGroup, Run, Timed
from gradsync.bench.report.lines import Axis, Curve, Point, line_plot
from gradsync.bench.report.scales import number, short_time
from gradsync.bench.report.spread import Spread, spread_plot
from gradsync.bench.report.svg import Figure
from gradsync.bench.report.timeline import MOST_RANKS, Lanes, summary, timeline_plot
from gradsync.bench.result import NO_DDP, Case, bus_factor
from gradsync.bench.stats import FASTER, NO_DIFFERENCE, SLOWER, TOO_FEW, median, percentile
from gradsync.bench.tables import Row, human_size, human_time, reference_of, sheets_of

IDEAL: Final = "ideal: no DDP × ranks"
MOST_NAMED: Final = 5  # cases in a sentence
_VERDICTS: Final = {
    FASTER: ("is faster than {}", "are faster than {}"),
    SLOWER: ("is slower than {}", "are slower than {}"),
    NO_DIFFERENCE: ("shows no difference", "show no difference"),
    TOO_FEW: ("has too few rounds to tell", "have too few rounds to tell"),
}


def model_figures(group: ModelGroup, content: Content) -> list[Figure]:
    """All plots of one model; those for which the files have no data are left out."""
    figures = [scaling(group, content)] if len(group.worlds) > 1 else []
    figures += [
        ratios(group, run, content) for run in group.runs if ratio_bars(group, run, content)
    ]
    figures += [distribution(group, world, content) for world in reversed(group.worlds)]
    for run in group.runs:
        figures += _timelines(group, run, content)
    return figures


def scaling(group: ModelGroup, content: Content) -> Figure:
    """Examples a second against ranks."""
    series: dict[tuple[int, str], list[Case]] = {}
    for each in group.drawn:
        series.setdefault((each.run.number, each.case.label), []).append(each.case)
    curves = [
        Curve(
            label=label, run=number_of_run, style=content.styles[label],
            points=[_scaling_point(group, case) for case in cases],
        )
        for (number_of_run, label), cases in series.items()
    ]  # fmt: skip
    base = next((c for c in _cases(group) if c.world == 1 and c.implementation == NO_DDP), None)
    if base is not None:
        rate = base.examples_per_second()
        points = [Point(x=world, y=rate * world) for world in group.worlds]
        curves.insert(0, Curve(label=IDEAL, points=points))
    most = group.worlds[-1]
    largest = [each for each in group.drawn if each.case.world == most]
    rates = "; ".join(
        f"{_who(each, content)} {_rate(each.case.examples_per_second())}" for each in largest
    )
    return line_plot(
        curves,
        name=f"{_slug(*group.key)}-scaling",
        title=f"{group.model}: examples a second",
        subtitle=f"{group.settings}; whiskers: the middle half",
        says=f"{_most_examples(group, largest, content)} Higher is better.",
        numbers=f"On {group.ranks(most)}: {rates}.",
        x_axis=Axis(title=f"{group.rank}s", show=number),
        y_axis=Axis(title=f"examples a second, all {group.rank}s together", show=number),
        run_names=[run.name for run in content.runs],
    )


def ratios(group: ModelGroup, run: Run, content: Content) -> Figure:
    """How many times as fast as torch's class, inside one run."""
    bars = ratio_bars(group, run, content)
    reference = reference_name(group, run)
    return bar_plot(
        bars,
        name=f"{_slug(*group.key, *_name(run, content))}-ratios",
        title=f"{group.model}: how many times as fast as {reference}",
        subtitle=_with_run("with the 95 % interval; right of 1 is faster", run, content),
        says=ratio_counts(bars, reference),
        numbers=ratio_sentence(bars, reference),
        axis=f"median time of {group.a_timed} with {reference} / its own",
    )


def ratio_bars(group: ModelGroup, run: Run, content: Content) -> list[Bar]:
    """The ratios that the table has, but for "no DDP": as the ideal it would dwarf the others."""
    result = group.of(run)
    cases = {(case.world, case.label): case for case in result.cases}
    return [
        Bar(
            group=group.ranks(row["ranks"]), label=label, style=content.styles[label], **_ratio(row)
        )
        for sheet in sheets_of(result)
        for row in sheet.rows
        if row.get("ratio") is not None
        and (row["ranks"], label := str(row["case"]).rstrip("*")) in cases
        and cases[row["ranks"], label].implementation != NO_DDP
    ]


def reference_name(group: ModelGroup, run: Run) -> str:
    """Whom the others are compared with."""
    cases = group.of(run).cases
    found = (reference_of([c for c in cases if c.world == world]) for world in group.worlds)
    return next((case.label for case in found if case is not None), "the first")


def ratio_sentence(bars: Sequence[Bar], reference: str) -> str:
    """What the bars say: who is faster, who is slower, who is neither.

    >>> from gradsync.bench.report.colours import Style
    >>> style = Style(slot="2", shape=2)
    >>> bar = Bar(group="2 ranks", label="x", style=style, value=1.5, verdict="faster")
    >>> ratio_sentence([bar], "torch/gloo")
    'Faster than torch/gloo: x, 2 ranks (1.50).'
    """
    sentences = []
    for verdict, words in (
        (FASTER, f"Faster than {reference}"),
        (SLOWER, f"Slower than {reference}"),
        (NO_DIFFERENCE, "No difference shown"),
        (TOO_FEW, "Too few rounds to tell"),
    ):
        found = [bar for bar in bars if bar.verdict == verdict]
        if found:
            more = f"; {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            named = "; ".join(_bar_words(bar) for bar in found[:MOST_NAMED])
            sentences.append(f"{words}: {named}{more}.")
    return " ".join(sentences)


def ratio_counts(bars: Sequence[Bar], reference: str) -> str:
    """The same in one short sentence.

    >>> from gradsync.bench.report.colours import Style
    >>> bar = Bar(group="", label="x", style=Style(slot="2", shape=2), value=1.5, verdict="faster")
    >>> ratio_counts([bar, bar], "torch/gloo")
    '2 of 2 are faster than torch/gloo.'
    """
    if len(bars) == 1 and bars[0].verdict in _VERDICTS:
        return f"{bars[0].label} {_VERDICTS[bars[0].verdict][0].format(reference)}."
    counts = {verdict: sum(bar.verdict == verdict for bar in bars) for verdict in _VERDICTS}
    said = [
        f"{count} of {len(bars)} {_VERDICTS[verdict][count > 1].format(reference)}"
        for verdict, count in counts.items()
        if count
    ]
    return f"{', '.join(said)}."


def distribution(group: ModelGroup, world: int, content: Content) -> Figure:
    """The times of the steps on one number of ranks."""
    members = [each for each in group.drawn if each.case.world == world]
    spreads = [
        Spread(
            label=_who(each, content),
            style=content.styles[each.case.label],
            seconds=each.case.measurements,
        )
        for each in members
    ]
    words = "; ".join(
        f"{_who(each, content)} {human_time(each.case.seconds(25))} to "
        f"{human_time(each.case.seconds(75))}"
        for each in members
    )
    best = min(_synced(members), key=lambda each: each.case.seconds(50))
    return spread_plot(
        spreads,
        name=f"{_slug(*group.key, world)}-steps",
        title=f"{group.model}: time of {group.a_timed} on {group.ranks(world)}",
        subtitle=f"each dot {group.a_timed}; box: the middle half; line: the median",
        timed=group.a_timed,
        says=f"Shortest median{_under_ddp(members)}: {_who(best, content)}, "
        f"{human_time(best.case.seconds(50))}. Shorter is better.",
        numbers=f"Half of the {group.timed}s took: {words}.",
    )


def _timelines(group: ModelGroup, run: Run, content: Content) -> Iterable[Figure]:
    """One for each number of ranks; of one rank only where there are no others."""
    told = [c for c in group.of(run).cases if c.timelines and c.error is None]
    worlds = sorted({case.world for case in told}, reverse=True)
    for world in [world for world in worlds if world > 1] or worlds:
        cases = [case for case in told if case.world == world]
        lanes = [
            Lanes(label=case.label, style=content.styles[case.label], timelines=case.timelines)
            for case in cases
        ]
        first = f"; the first {MOST_RANKS} ranks" if world > MOST_RANKS else ""
        words = "; ".join(f"{case.label}: {summary(case.timelines)}" for case in cases)
        yield timeline_plot(
            lanes,
            name=f"{_slug(*group.key, world, *_name(run, content))}-timeline",
            title=f"{group.model}: {group.a_timed} on {group.ranks(world)}",
            subtitle=_with_run(f"mean of a few steps, without the optimizer{first}", run, content),
            says=_least_exposed(cases),
            numbers=f"{words}.",
        )


# ------------------------------------------------------------------------- collectives


def comm_figures(group: CommGroup, content: Content) -> list[Figure]:
    """All plots of one collective: time, bandwidths, ratios."""
    if not group.drawn:
        return []
    factor = bus_factor(group.collective, group.world)
    same = f"busbw is {factor:.3g} × algbw here"
    figures = [
        _comm_curves(group, content, "time", "time of a call"),
        _comm_curves(group, content, "algbw", f"algbw{' = busbw' if factor == 1 else ''}"),
    ]
    if factor != 1:
        figures.append(_comm_curves(group, content, "busbw", "busbw", note=f"; {same}"))
    for run in group.runs:
        bars = comm_bars(group, run, content)
        if bars:
            reference = group.of(run).comm_cases[0].backend
            where = f"{group.collective} on {_ranks(group.world)}"
            figures.append(
                bar_plot(
                    bars,
                    name=f"{_slug(*_comm_key(group), *_name(run, content))}-ratios",
                    title=f"{where}: speed against {reference}",
                    subtitle=_with_run(
                        "with the 95 % interval; right of 1 is faster", run, content
                    ),
                    says=ratio_counts(bars, reference),
                    numbers=ratio_sentence(bars, reference),
                    axis=f"median time of {reference} / its own",
                )
            )
    return figures


def comm_bars(group: CommGroup, run: Run, content: Content) -> list[Bar]:
    """The ratios that the table has, for drawing."""
    several = len({case.backend for case in group.of(run).comm_cases}) > 2
    return [
        Bar(
            group=human_size(row["bytes"]) if several else "",
            label=backend if several else f"{human_size(row['bytes'])}, {backend}",
            style=content.styles[backend],
            **_ratio(row),
        )
        for sheet in sheets_of(group.of(run))
        for row in sheet.rows
        if row.get("ratio") is not None
        and (backend := str(row["backend"]).rstrip("*")) in content.styles
    ]


def _comm_curves(
    group: CommGroup, content: Content, what: str, title: str, note: str = ""
) -> Figure:
    series: dict[tuple[int, str], list[Point]] = {}
    for each in group.drawn:
        case = each.case
        seconds = median(case.seconds)
        hint = f"{case.backend}, {human_size(case.bytes)}: {human_time(seconds)}"
        if what == "time":
            low, high = percentile(case.seconds, 25), percentile(case.seconds, 75)
            point = Point(x=case.bytes, y=seconds, low=low, high=high, hint=hint)
        else:
            value = case.algbw if what == "algbw" else case.busbw
            hint = f"{case.backend}, {human_size(case.bytes)}: {value:.3g} GB/s"
            point = Point(x=case.bytes, y=value, hint=hint)
        series.setdefault((each.run.number, case.backend), []).append(point)
    curves = [
        Curve(label=backend, run=run, style=content.styles[backend], points=points)
        for (run, backend), points in series.items()
    ]
    is_time = what == "time"
    shown = human_time if is_time else _gigabytes
    words = ", ".join(
        f"{curve.label} {shown(curve.points[-1].y)} at {human_size(curve.points[-1].x)}"
        for curve in curves
    )
    better = "Lower is better." if is_time else "Higher is better."
    return line_plot(
        curves,
        name=f"{_slug(*_comm_key(group))}-{what}",
        title=f"{group.collective} on {_ranks(group.world)}: {title}",
        subtitle=f"{group.dtype}; median over the rounds{note}",
        says=f"{words}. {better}",
        x_axis=Axis(title="bytes, as nccl-tests count them", show=human_size),
        y_axis=Axis(
            title="time of one call" if is_time else f"{what}, GB a second",
            show=short_time if is_time else number,
            is_log=is_time,
        ),
        run_names=[run.name for run in content.runs],
    )


def _gigabytes(value: float) -> str:
    return f"{value:.3g} GB/s"


# ------------------------------------------------------------------------- two runs


def run_bars(rows: Sequence[Row], content: Content) -> list[Bar]:
    """The ratios of ``gradsync diff``, for drawing."""
    usual = next(iter(content.styles.values()))
    bars = []
    for row in rows:
        label = str(row["case"]).split(" → ")[-1]
        style = content.styles.get(label, usual)
        where = f"{row['title']}, {_ranks(row['ranks'])}"
        bars.append(Bar(group=where, label=str(row["case"]), style=style, **_ratio(row)))
    return bars


def run_figure(first: Run, other: Run, bars: Sequence[Bar]) -> Figure:
    """One run against the first, case by case."""
    return bar_plot(
        bars,
        name=f"{_slug(other.name, other.number)}-against-{_slug(first.name)}",
        title=f"{other.name}: how many times as fast as {first.name}",
        subtitle="two runs at two times; 95 % interval; right of 1 is faster",
        says=ratio_counts(bars, first.name),
        numbers=ratio_sentence(bars, first.name),
        axis=f"median time in {first.name} / in {other.name}",
    )


# ------------------------------------------------------------------------- words


def _cases(group: ModelGroup) -> list[Case]:
    return [each.case for each in group.drawn]


def _synced(members: Sequence[Timed]) -> Sequence[Timed]:
    """Those under DDP, if there are any: without it there is nothing to wait for."""
    return [each for each in members if each.case.implementation != NO_DDP] or members


def _under_ddp(members: Sequence[Timed]) -> str:
    is_mixed = 0 < len(_synced(members)) < len(members)
    return " under DDP" if is_mixed else ""


def _least_exposed(cases: Sequence[Case]) -> str:
    """Who hides communication best, of those that have any."""
    talking = {case.label: case.exposed or 0.0 for case in cases if case.world > 1 and case.backend}
    if not talking:
        return "Nothing to communicate."
    best = min(talking, key=talking.__getitem__)
    return f"Least communication exposed: {best}, {human_time(talking[best])} a step."


def _rate(examples: float) -> str:
    return number(round(examples)) if examples >= 10 else f"{examples:.1f}"


def _most_examples(group: ModelGroup, members: Sequence[Timed], content: Content) -> str:
    best = max(_synced(members), key=lambda each: each.case.examples_per_second())
    rate = _rate(best.case.examples_per_second())
    where = f"on {group.ranks(best.case.world)}{_under_ddp(members)}"
    return f"Most examples a second {where}: {_who(best, content)}, {rate}."


def _scaling_point(group: ModelGroup, case: Case) -> Point:
    rate = case.examples_per_second()
    return Point(
        x=case.world,
        y=rate,
        low=case.examples_per_second(75),
        high=case.examples_per_second(25),
        hint=f"{case.label} on {group.ranks(case.world)}: {_rate(rate)} examples a second",
    )


def _bar_words(bar: Bar) -> str:
    return ", ".join(part for part in (bar.label, bar.group) if part) + f" ({bar.words})"


def _ratio(row: Row) -> Row:
    return {
        "value": row["ratio"],
        "low": row["ratio_low"],
        "high": row["ratio_high"],
        "verdict": row["verdict"],
    }


def _who(each: Timed, content: Content) -> str:
    """The label, and the run where there are several."""
    return ", ".join([each.case.label, *_name(each.run, content)])


def _name(run: Run, content: Content) -> list[str]:
    return [run.name] if len(content.runs) > 1 else []


def _with_run(words: str, run: Run, content: Content) -> str:
    return "; ".join([*_name(run, content), words])


def _comm_key(group: CommGroup) -> tuple[str, ...]:
    return group.collective, f"{group.world}", group.dtype


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _slug(*parts: object) -> str:
    """For names of files and of places on the page.

    >>> _slug("my model", 32, "float32")
    'my-model-32-float32'
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", "-".join(str(part) for part in parts)).strip("-")
