"""The page: one HTML file that brings its style and its script, and asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from importlib import resources
from typing import Final

from gradsync.bench import compare, hybrid_sheet, tables
from gradsync.bench.report import figures
from gradsync.bench.report.bars import Bar
from gradsync.bench.report.colours import DARK, LIGHT, css
from gradsync.bench.report.data import CommGroup, Content, ModelGroup, Run
from gradsync.bench.report.html_table import html_table
from gradsync.bench.report.svg import Figure, inline
from gradsync.bench.result import COMPLETE
from gradsync.bench.tables import Column, Row, Sheet, human_time

NOTHING: Final = "The files hold no measurements: there is nothing to draw."


class Page:
    """The sections in their order, and all figures that were drawn for them."""

    def __init__(self, content: Content, title: str) -> None:
        self.content = content
        self.title = title
        self.figures: list[Figure] = []
        self.findings: list[str] = []
        self.sections: list[tuple[str, str, str]] = []  # id, name, HTML
        for number, group in enumerate(content.models):
            alike = [each.model for each in content.models].count(group.model) > 1
            name = f"{group.model}, {group.settings}" if alike else group.model
            self._add(f"model-{number}", name, self._model(group, number))
        for number, comm in enumerate(content.collectives):
            name = f"{comm.collective}, {comm.world} ranks"
            self._add(f"collective-{number}", name, self._collective(comm, number))
        for first, run in _comparable(content.runs):
            self._add(f"runs-{run.number}", f"{run.name} and {first.name}", self._runs(first, run))
        if failed := _failures(content):
            self._add("failed", "Failed", failed)
        self._add("machine", "Machine and settings", _facts(content))

    def html(self) -> str:
        """The whole file."""
        style = _resource("page.css") + css(LIGHT) + _dark(css(DARK))
        script = _resource("sort.js")
        links = "".join(
            f'<li><a href="#{place}">{escape(name)}</a></li>' for place, name, _ in self.sections
        )
        sections = "\n".join(
            f'<section id="{place}"><h2>{escape(name)}</h2>\n{body}</section>'
            for place, name, body in self.sections
        )
        policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escape(self.title)}</title>\n<style>{style}</style></head>\n<body>\n"
            f"<header><h1>{escape(self.title)}</h1>\n{self._lead()}\n"
            f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
            f"<main>\n{sections}\n</main>\n"
            "<footer><p>Made by <code>gradsync report</code>. Ratios inside one run hold on a "
            "noisy machine, because its contenders take turns; two runs happen at two times.</p>"
            "</footer>\n"
            f"<script>{script}</script>\n</body></html>\n"
        )

    def _add(self, place: str, name: str, body: str) -> None:
        self.sections.append((place, name, body))

    def _lead(self) -> str:
        """The runs, and what they found, before all details."""
        runs = "".join(f"<li>{_describe(run)}</li>" for run in self.content.runs)
        if not self.content.has_times:
            self.findings = [NOTHING]
        found = "".join(f"<li>{finding}</li>" for finding in self.findings)
        heading = "<h2>At a glance</h2>" if found else ""
        return f'<ul class="runs">{runs}</ul>\n{heading}<ul class="findings">{found}</ul>'

    def _model(self, group: ModelGroup, number: int) -> str:
        self.findings += [
            finding
            for run in group.runs
            if (finding := _finding(group, run, self.content)) is not None
        ]
        drawn = figures.model_figures(group, self.content)
        missing = _missing(group)
        parts = [f"<p>{escape(group.settings)}{_parameters(group)}</p>"]
        parts += [f'<p class="note">Not drawn: {"; ".join(missing)}.</p>'] if missing else []
        parts.append(self._grid(drawn))
        for run in group.runs:
            sheets_of = hybrid_sheet.sheets_of if group.is_hybrid else tables.sheets_of
            sheets = [sheet for sheet in sheets_of(group.of(run)) if sheet.title != "failed"]
            sheets += _timeline_sheets(group, run)
            parts += self._tables(sheets, run, f"table-{number}-{run.number}")
        return "\n".join(parts)

    def _collective(self, group: CommGroup, number: int) -> str:
        parts = [self._grid(figures.comm_figures(group, self.content))]
        for run in group.runs:
            sheets = [s for s in tables.sheets_of(group.of(run)) if s.title != "failed"]
            parts += self._tables(sheets, run, f"comm-{number}-{run.number}")
            bars = figures.comm_bars(group, run, self.content)
            if bars:
                self.findings.append(_comm_finding(group, run, bars, self.content))
        return "\n".join(parts)

    def _runs(self, first: Run, run: Run) -> str:
        """A run against an earlier one."""
        comparison = compare.compare(first.result, run.result)
        bars = figures.run_bars(comparison.rows, self.content)
        parts = [
            f"<p>{escape(run.name)} against {escape(first.name)}, case by case.</p>",
            self._grid([figures.run_figure(first, run, bars)]),
        ]
        sheets = compare.sheets_of(comparison)
        parts += self._tables(sheets[1:], None, f"runs-{run.number}-table")
        notes = [note for sheet in sheets if not sheet.rows for note in sheet.notes]
        parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
        return "\n".join(parts)

    def _grid(self, drawn: Sequence[Figure]) -> str:
        drawn = [self._named_apart(each) for each in drawn]
        cells = "\n".join(
            f'<figure id="{each.name}">{inline(each)}'
            f"<figcaption>{escape(each.says)}</figcaption></figure>"
            for each in drawn
        )
        return f'<div class="figures">\n{cells}\n</div>' if drawn else ""

    def _named_apart(self, figure: Figure) -> Figure:
        """Its name is that of a file and of a place on the page: no two may have the same."""
        names = {each.name for each in self.figures}
        name, number = figure.name, 2
        while name in names:
            name, number = f"{figure.name}-{number}", number + 1
        self.figures.append(replace(figure, name=name))
        return self.figures[-1]

    def _tables(self, sheets: Sequence[Sheet], run: Run | None, name: str) -> Iterable[str]:
        several = run is not None and len(self.content.runs) > 1
        for number, sheet in enumerate(sheets):
            title = f"{sheet.title} · {run.name}" if run is not None and several else sheet.title
            renamed = Sheet(title=title, columns=sheet.columns, rows=sheet.rows, notes=sheet.notes)
            yield html_table(renamed, name=f"{name}-{number}")


def _comparable(runs: Sequence[Run]) -> Iterable[tuple[Run, Run]]:
    """Each run with the first one before it that has a case in common with it."""
    for place, run in enumerate(runs):
        for first in runs[:place]:
            if compare.share_cases(first.result, run.result):
                yield first, run
                break


# ------------------------------------------------------------------------- words


def _describe(run: Run) -> str:
    result = run.result
    parts = [f"<strong>{escape(run.name)}</strong>"]
    if result.created:
        parts.append(f"<time>{escape(_when(result.created))}</time>")
    if result.schema_version is None:
        parts.append("written by torch's benchmark.py")
    if result.command:
        parts.append(f"<code>{escape(result.command)}</code>")
    if result.status != COMPLETE:
        parts.append(f'<em class="slower">{escape(result.status)}: not all was measured</em>')
    return " · ".join(parts)


def _when(created: str) -> str:
    """Without seconds, if it is a date as we write it."""
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z")
    except ValueError:
        return created


def _finding(group: ModelGroup, run: Run, content: Content) -> str | None:
    """The ratios on the most ranks of this run."""
    bars = figures.ratio_bars(group, run, content)
    if not bars:
        return None
    last = [bar for bar in bars if bar.group == bars[-1].group]
    reference = figures.reference_name(group, run)
    words = figures.ratio_sentence([replace(bar, group="") for bar in last], reference)
    return _found(f"{group.model}, {last[0].group}", words, run, content)


def _comm_finding(group: CommGroup, run: Run, bars: Sequence[Bar], content: Content) -> str:
    low, high = min(bar.value for bar in bars), max(bar.value for bar in bars)
    first, *others = dict.fromkeys(case.backend for case in group.of(run).comm_cases)
    who = f"{others[0]} is" if len(others) == 1 else "the others are"
    words = f"{who} {low:.2f} to {high:.2f} times as fast as {first}, depending on the size."
    return _found(f"{group.collective}, {group.world} ranks", words, run, content)


def _found(what: str, words: str, run: Run, content: Content) -> str:
    where = f" ({escape(run.name)})" if len(content.runs) > 1 else ""
    return f"<strong>{escape(what)}</strong>{where}: {escape(words)}"


def _missing(group: ModelGroup) -> list[str]:
    """Why some plots are not there."""
    missing = []
    if len(group.worlds) == 1 and not group.is_hybrid:
        missing.append("one number of ranks only, so there is no scaling curve")
    if not any(each.case.timelines for each in group.drawn) and not group.is_hybrid:
        missing.append("the files do not tell the parts of a step, so there is no timeline")
    return missing


def _parameters(group: ModelGroup) -> str:
    counts = {each.case.parameters for each in group.members if each.case.parameters}
    return "".join(f", {count:,} parameters" for count in sorted(counts))


# ------------------------------------------------------------------------- tables of our own


def _timeline_sheets(group: ModelGroup, run: Run) -> list[Sheet]:
    rows: list[Row] = [
        {
            "ranks": case.world,
            "case": case.label,
            "rank": timeline.rank,
            **{
                key: getattr(timeline, key)
                for key in ("forward", "backward", "communication", "exposed")
            },
        }
        for case in group.of(run).cases
        for timeline in case.timelines
    ]
    if not rows:
        return []
    times = ("forward", "backward", "communication", "exposed")
    columns = (
        *(Column(key=key, title=key) for key in ("ranks", "case", "rank")),
        *(Column(key=key, title=key, show=human_time) for key in times),
    )
    return [Sheet(title=f"{group.model}: the mean step of each rank", columns=columns, rows=rows)]


def _failures(content: Content) -> str:
    parts = []
    for run in content.runs:
        failed = [s for s in tables.sheets_of(run.result) if s.title == "failed"]
        for sheet in failed:
            title = f"{run.name}: what could not be measured, and why"
            renamed = Sheet(title=title, columns=sheet.columns, rows=sheet.rows)
            parts.append(html_table(renamed, name=f"failed-{run.number}"))
    return "\n".join(parts)


def _facts(content: Content) -> str:
    """What the runs say about the machine, a column for each."""
    facts = [_facts_of(run) for run in content.runs]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    columns = [Column(key="key", title="fact")]
    columns += [Column(key=str(run.number), title=run.name) for run in content.runs]
    rows: list[Row] = [
        {"key": key, **{str(number): each.get(key, "–") for number, each in enumerate(facts)}}
        for key in keys
    ]
    title = "What each run recorded" if len(content.runs) > 1 else "What the run recorded"
    parts = [html_table(Sheet(title=title, columns=columns, rows=rows), name="facts")]
    for topology, names in _topologies(content.runs).items():
        parts.append(
            f"<details><summary>Topology: {escape(', '.join(names))}</summary>"
            f'<pre class="scroll" tabindex="0">{escape(topology)}</pre></details>'
        )
    notes = dict.fromkeys(str(note) for run in content.runs for note in run.result.notes)
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    return "\n".join(parts)


def _topologies(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Each topology once, with the runs that had it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if topology := str(run.result.header.get("topology") or ""):
            found.setdefault(topology, []).append(run.name)
    return found


def _facts_of(run: Run) -> dict[str, str]:
    result = run.result
    own = {
        "kind": result.kind,
        "created": result.created,
        "status": result.status,
        "torch": result.pytorch_version,
        "cuda": result.cuda_version,
        "backends": result.distributed_backend,
        "bucket size, MB": result.bucket_size,
    }
    facts = {**own, **{k: v for k, v in result.header.items() if k != "topology"}}
    return {key: str(value) for key, value in facts.items() if value not in (None, "", [])}


# ------------------------------------------------------------------------- pieces of the file


def _resource(name: str) -> str:
    return resources.files("gradsync.bench.report").joinpath(name).read_text(encoding="utf-8")


def _dark(rules: str) -> str:
    return f"\n@media screen and (prefers-color-scheme: dark) {{\n{rules}\n}}\n"


def _hash(text: str) -> str:
    """For the policy, by which the browser runs this script and this style and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
