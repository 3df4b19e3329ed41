"""What is in the files, sorted for drawing: runs, and the cases of all runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gradsync.bench.report.colours import Style, styles_of
from gradsync.bench.result import BENCH_HYBRID, Case, CommCase, Result

_IMPOSSIBLE: Final = "the file holds times, sizes or ranks that cannot be"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file: how the page calls it, and its place among the files."""

    name: str
    number: int
    result: Result


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A case with times, and the run that it is of."""

    run: Run
    case: Case


@dataclass(frozen=True, kw_only=True)
class TimedComm:
    """The same for a collective."""

    run: Run
    case: CommCase


@dataclass(frozen=True, kw_only=True)
class ModelGroup:
    """One model with one batch size and type, in all runs; hybrid training has words of its own."""

    model: str
    batch_size: int
    dtype: str
    is_hybrid: bool
    members: tuple[Timed, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What its cases have in common."""
        return self.model, self.batch_size, self.dtype

    @property
    def settings(self) -> str:
        """For people."""
        if self.is_hybrid:
            return f"an epoch has about {self.batch_size} bags a trainer, {self.dtype}"
        return f"batch size {self.batch_size} a rank, {self.dtype}"

    @property
    def timed(self) -> str:
        """What a measurement is the time of."""
        return "epoch" if self.is_hybrid else "step"

    @property
    def a_timed(self) -> str:
        """The same with its article."""
        return "an epoch" if self.is_hybrid else "a step"

    @property
    def rank(self) -> str:
        """Who measures."""
        return "trainer" if self.is_hybrid else "rank"

    def ranks(self, world: int) -> str:
        """So many of them, in words."""
        return f"{world} {self.rank}{'' if world == 1 else 's'}"

    @property
    def drawn(self) -> list[Timed]:
        """Those whose times count."""
        return [each for each in self.members if each.case.error is None]

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks that are drawn, small ones first."""
        return sorted({each.case.world for each in self.drawn})

    @property
    def runs(self) -> list[Run]:
        """The runs that measured it."""
        return _runs_of(self.members)

    def of(self, run: Run) -> Result:
        """What this run says of the model, and of nothing else."""
        cases = [each.case for each in self.members if each.run is run]
        return replace(run.result, cases=cases, comm_cases=[])


@dataclass(frozen=True, kw_only=True)
class CommGroup:
    """One collective on one number of ranks, in all runs."""

    collective: str
    world: int
    dtype: str
    members: tuple[TimedComm, ...]

    @property
    def drawn(self) -> list[TimedComm]:
        """Those whose times count."""
        return [each for each in self.members if each.case.error is None]

    @property
    def runs(self) -> list[Run]:
        """The runs that measured it."""
        return _runs_of(self.members)

    def of(self, run: Run) -> Result:
        """What this run says of the collective, and of nothing else."""
        cases = [each.case for each in self.members if each.run is run]
        return replace(run.result, cases=[], comm_cases=cases)


@dataclass(frozen=True, kw_only=True)
class Content:
    """All that the page is made of."""

    runs: tuple[Run, ...]
    models: tuple[ModelGroup, ...]
    collectives: tuple[CommGroup, ...]
    styles: dict[str, Style]  # by label, see colours.py

    @property
    def has_times(self) -> bool:
        """Is there anything to draw?"""
        return bool(self.models or self.collectives)


def collect(results: Sequence[tuple[Path, Result]]) -> Content:
    """Sort what the files hold.

    >>> case = Case(
    ...     model="mlp", batch_size=8, ranks=(0,), implementation="torch", measurements=(1.0,)
    ... )
    >>> content = collect([(Path("a.json"), Result(cases=[case])), (Path("b.json"), Result())])
    >>> [run.name for run in content.runs], [group.model for group in content.models]
    (['a', 'b'], ['mlp'])
    """
    names = run_names([path for path, _ in results])
    runs = tuple(
        Run(name=name, number=number, result=_checked(result))
        for number, (name, (_, result)) in enumerate(zip(names, results, strict=True))
    )
    timed = [
        Timed(run=run, case=case) for run in runs for case in run.result.cases if case.measurements
    ]
    comm = [
        TimedComm(run=run, case=case)
        for run in runs
        for case in run.result.comm_cases
        if case.seconds
    ]
    labels = [each.case.label for each in timed]
    return Content(
        runs=runs,
        models=tuple(_models(timed)),
        collectives=tuple(_collectives(comm)),
        styles=styles_of(labels) | styles_of(each.case.backend for each in comm),
    )


def run_names(paths: Sequence[Path]) -> list[str]:
    """The names of the files without their ending; a number where two are the same.

    >>> run_names([Path("x/a.json"), Path("y/a.json"), Path("b.json")])
    ['a', 'a (2)', 'b']
    """
    names: list[str] = []
    for path in paths:
        name, number = path.stem or str(path), 2
        while name in names:
            name, number = f"{path.stem} ({number})", number + 1
        names.append(name)
    return names


def _checked(result: Result) -> Result:
    """The same; cases with impossible values become failed ones, so that all others are drawn."""
    cases = [_checked_case(case) if case.measurements else case for case in result.cases]
    comm = [
        case
        if not case.seconds or (case.bytes > 0 and case.world > 0 and _are_times(case.seconds))
        else replace(case, seconds=(), error=_IMPOSSIBLE)
        for case in result.comm_cases
    ]
    return replace(result, cases=cases, comm_cases=comm)


def _checked_case(case: Case) -> Case:
    if not (case.world > 0 and case.batch_size > 0 and _are_times(case.measurements)):
        return replace(case, measurements=(), error=_IMPOSSIBLE)
    told = tuple(
        each
        for each in case.timelines
        if min(each.forward, each.backward, each.communication, each.exposed) >= 0
        and math.isfinite(each.ended + each.communication)
    )
    return replace(case, timelines=told)


def _are_times(seconds: Sequence[float]) -> bool:
    return all(0 < each < math.inf for each in seconds)


def _models(timed: Sequence[Timed]) -> Iterable[ModelGroup]:
    groups: dict[tuple[Any, ...], list[Timed]] = {}
    for each in timed:
        is_hybrid = each.run.result.kind == BENCH_HYBRID
        key = (each.case.model, each.case.batch_size, each.case.dtype, is_hybrid)
        groups.setdefault(key, []).append(each)
    for (model, batch_size, dtype, is_hybrid), members in groups.items():
        yield ModelGroup(
            model=model,
            batch_size=batch_size,
            dtype=dtype,
            is_hybrid=is_hybrid,
            members=tuple(members),
        )


def _collectives(comm: Sequence[TimedComm]) -> Iterable[CommGroup]:
    groups: dict[tuple[Any, ...], list[TimedComm]] = {}
    for each in comm:
        key = (each.case.collective, each.case.world, each.case.dtype)
        groups.setdefault(key, []).append(each)
    for (collective, world, dtype), members in groups.items():
        yield CommGroup(collective=collective, world=world, dtype=dtype, members=tuple(members))


def _runs_of(members: Sequence[Timed | TimedComm]) -> list[Run]:
    return list({each.run.number: each.run for each in members}.values())
