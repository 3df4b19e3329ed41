"""What was measured so far: kept in a file, shown while it grows.

The display is redrawn at most once a second, since it takes its time from the cores on which
the ranks are measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from gradsync.bench import files
from gradsync.bench.comm import CommHeat
from gradsync.bench.hybrid_race import HybridHeat, hybrid_cases_of
from gradsync.bench.launch import AnyHeat
from gradsync.bench.plan import cases_of
from gradsync.bench.result import COMPLETE, INTERRUPTED, RUNNING, Case, CommCase, Result, Timeline
from gradsync.bench.stats import median, ratio_of_medians
from gradsync.bench.tables import human_size, human_time
from gradsync.bench.workloads import model_name

REFRESH_SECONDS: Final = 1.0
ASTRAY: Final = "its weights are not those of the other contenders: its times do not count"


class Board:
    """Takes the events of the ranks, see ``handle``; writes the file, draws the display."""

    def __init__(
        self, result: Result, heats: Sequence[AnyHeat], *, console: Console, path: Path | None
    ) -> None:
        self.result = result
        self.console = console
        self._path = path
        self._heats = heats
        self._cannot_run: tuple[list[Case], list[CommCase]] = (result.cases, result.comm_cases)
        self._cases = [_blank(heat) for heat in heats]
        self._is_done = [False] * len(heats)
        self._is_begun = [False] * len(heats)
        self._now = "starting"
        self._drawn = self._saved = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self.result.status = RUNNING

    # --------------------------------------------------------------------- the run

    def __enter__(self) -> Board:
        self._update(save=True)
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def finish(self, *, is_interrupted: bool) -> None:
        """The last word: the file says how the run ended."""
        self.result.status = INTERRUPTED if is_interrupted else COMPLETE
        self._update(save=True)

    def is_done(self, heat: int) -> bool:
        """Has it run to its end?"""
        return self._is_done[heat]

    def fail(self, heat: int, message: str) -> None:
        """It ended with an error; what it measured before stands."""
        self._cases[heat] = [
            case if case.complete else replace(case, error=case.error or message)
            for case in self._cases[heat]
        ]
        self._say(f"[red]{self._title(heat)}: {_escape(message)}[/]")
        self._update(save=True)

    def handle(self, heat: int, event: dict[str, Any]) -> None:
        """An event of ``worker.run_heat`` or ``comm.run_comm_heat``."""
        name, index = event["event"], event.get("contender")
        cases = self._cases[heat]
        self._now = self._describe(heat, event)
        if name == "begun":
            self._is_begun[heat] = True
            self._say(f"{self._title(heat)} ...")
        elif name == "done":
            self._is_done[heat] = True
            self._cases[heat] = [replace(case, complete=True) for case in cases]
            for case in self._cases[heat]:
                self._say(_line(case))
        elif name == "ready":
            known = {"batch_size": event["batch_size"], "parameters": event["parameters"]}
            self._cases[heat] = [replace(case, **known) for case in cases]
        elif index is not None:
            cases[index] = _after(cases[index], event)
        self._update(save=name in ("measured", "timed", "done"))

    # --------------------------------------------------------------------- the file

    def _update(self, *, save: bool) -> None:
        every = [case for cases in self._cases for case in cases]
        mine = [case for case in every if _is_worth_keeping(case)]
        cannot, cannot_comm = self._cannot_run
        self.result.cases = [*cannot, *(case for case in mine if isinstance(case, Case))]
        self.result.comm_cases = [
            *cannot_comm, *(case for case in mine if isinstance(case, CommCase))
        ]  # fmt: skip
        now = time.monotonic()
        is_over = self.result.status != RUNNING or all(self._is_done)
        if save and self._path and (is_over or now - self._saved > REFRESH_SECONDS):
            self._saved = now
            files.write(self._path, self.result)
        if self._live.is_started and (is_over or now - self._drawn > REFRESH_SECONDS):
            self._drawn = now
            self._live.update(self._draw(), refresh=True)

    # --------------------------------------------------------------------- the display

    def _say(self, text: str) -> None:
        """Without a terminal the display is a log."""
        if text and not self._live.is_started:
            self.console.print(text, soft_wrap=True)

    def _draw(self) -> RenderableType:
        done = sum(self._is_done)
        table = Table("", "ranks", "", "median", "rounds", "against the first", box=None)
        rows = [row for heat in range(len(self._heats)) for row in self._rows(heat)]
        for row in rows[-max(5, self.console.height - 8) :]:
            table.add_row(*row)
        left = [heat for heat, begun in enumerate(self._is_begun) if not begun]
        coming = ", ".join(
            f"{name} on {', '.join(str(self._heats[heat].world) for heat in group)}"
            for name, group in groupby(left, key=lambda heat: _name(self._heats[heat]))
        )
        return Group(
            f"[bold]{done} of {len(self._heats)} done; {self._now}[/]",
            table,
            f"[dim]left: {coming or 'nothing'}. Ctrl-C stops and keeps what was measured.[/]",
        )

    def _rows(self, heat: int) -> list[tuple[str, ...]]:
        cases = [case for case in self._cases[heat] if _is_worth_keeping(case)]
        first = next((case for case in cases if _times(case)), None)
        return [
            (
                _name(self._heats[heat]),
                str(self._heats[heat].world),
                _escape(case.backend if isinstance(case, CommCase) else case.label),
                "[red]failed[/]" if case.error else human_time(median(_times(case))),
                str(len(case.by_round())),
                _against(first, case),
            )
            for case in cases
        ]

    def _title(self, heat: int) -> str:
        world = self._heats[heat].world
        who = "trainer" if isinstance(self._heats[heat], HybridHeat) else "rank"
        return f"{_name(self._heats[heat])}, {world} {who}{'' if world == 1 else 's'}"

    def _describe(self, heat: int, event: dict[str, Any]) -> str:
        what = event["event"]
        contender = event.get("contender")
        if contender is not None:
            case = self._cases[heat][contender]
            what = case.backend if isinstance(case, CommCase) else case.label
            what += f", round {event['round'] + 1}" if "round" in event else ", warming up"
        return f"{self._title(heat)}: {what}"


def _blank(heat: AnyHeat) -> list[Any]:
    if isinstance(heat, HybridHeat):
        return hybrid_cases_of(heat)
    return comm_cases_of(heat) if isinstance(heat, CommHeat) else cases_of(heat)


def comm_cases_of(heat: CommHeat, *, error: str | None = None) -> list[CommCase]:
    """One case for each backend, with nothing measured yet."""
    return [
        CommCase(
            collective=heat.collective,
            bytes=4 * heat.count,
            backend=backend,
            world=heat.world,
            complete=False,
            error=error,
        )
        for backend in heat.backends
    ]


def _after(case: Any, event: dict[str, Any]) -> Any:
    """The case with what the event tells."""
    match event["event"]:
        case "measured":
            before = case.by_rank() if case.measurements else [()] * case.world
            joined = [(*old, *new) for old, new in zip(before, event["seconds"], strict=True)]
            lengths = tuple(len(rank) for rank in joined)
            return replace(
                case,
                measurements=tuple(value for rank in joined for value in rank),
                steps_by_round=(*case.steps_by_round, max(map(len, event["seconds"]))),
                steps_by_rank=lengths if len(set(lengths)) > 1 else (),
            )
        case "built":
            known = [value for value in event["peak_memory"] if value is not None]
            return replace(case, peak_memory=tuple(known))
        case "watched":
            known = [Timeline(**each) for each in event["timelines"] if each is not None]
            return replace(case, timelines=tuple(known))
        case "astray":
            return replace(case, error=ASTRAY)
        case "calibrated":
            wrong = None if event["correct"] else "its result is wrong: its times do not count"
            return replace(
                case, correct=event["correct"], repetitions=event["repetitions"], error=wrong
            )
        case "timed":
            return replace(case, seconds=(*case.seconds, event["seconds"]))
    return case


def _is_worth_keeping(case: Case | CommCase) -> bool:
    return bool(_times(case)) or case.error is not None


def _times(case: Case | CommCase) -> Sequence[float]:
    return case.measurements if isinstance(case, Case) else case.seconds


def _name(heat: AnyHeat) -> str:
    if isinstance(heat, CommHeat):
        return f"{heat.collective} {human_size(heat.bytes)}"
    return heat.name if isinstance(heat, HybridHeat) else model_name(heat.workload)


def _line(case: Case | CommCase) -> str:
    label = case.backend if isinstance(case, CommCase) else case.label
    if case.error or not _times(case):
        return f"  {label}: [red]{_escape(case.error or 'nothing measured')}[/]"
    return f"  {label}: median {human_time(median(_times(case)))}"


def _against(first: Case | CommCase | None, case: Case | CommCase) -> str:
    if first is None or first is case or not _times(case):
        return ""
    ratio = ratio_of_medians(first.by_round(), case.by_round(), paired=True, resamples=200)
    if ratio.low is None or ratio.high is None:
        return f"× {ratio.value:.2f}"
    return f"× {ratio.value:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
