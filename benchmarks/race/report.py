"""The race's results for people (rich, markdown) and for programs (JSON)."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from race.memory import MemoryRow
from race.stats import FASTER, SLOWER, Row, complete_rounds, summarise
from race.track import Lap
from race.workloads import WORKLOADS

SCHEMA = 1
COLUMNS = ("contender", "step ms", "of local", "ratio", "95 % spread", "verdict")
MEMORY_COLUMNS = ("workload", "contender", "parameters MB", "peak growth MB", "of torch's")
STYLES = {FASTER: "green", SLOWER: "red"}
README_COLUMNS = {
    "gradsync": "ours, defaults",
    "gradsync-tuned": "ours, views and static graph",
    "gradsync-shm": "ours in shared memory, defaults",
    "gradsync-shm-tuned": "ours in shared memory, views and static graph",
}


def print_tables(console: Console, laps: Sequence[Lap]) -> None:
    for lap in laps:
        table = Table(*COLUMNS, title=_title(lap), title_justify="left")
        for row in summarise(lap.seconds_per_step, lap.rivals):
            verdict = row.ratio.verdict if row.ratio else ""
            table.add_row(*_cells(row), style=STYLES.get(verdict))
        console.print(table if table.row_count else f"{_title(lap)}: no round finished")
        for warning in _warnings(lap):
            console.print(f"[yellow]{warning}[/]")
    console.print(
        "ratio = time of torch / ours, paired in each round, median; torch is the better variant, "
        "or the hook that ours takes the place of"
    )


def markdown(laps: Sequence[Lap]) -> str:
    lines = markdown_head(("workload", *COLUMNS))
    for lap in laps:
        for row in summarise(lap.seconds_per_step, lap.rivals):
            lines.append("| " + " | ".join((lap.workload, *_cells(row))) + " |")
        lines += [f"\n{warning}" for warning in _warnings(lap)]
    return "\n".join(lines)


def readme(laps: Sequence[Lap]) -> str:
    """The README's table: a row a workload, a column a contender of ours, the ratio to torch."""
    rows = {
        lap.workload: {row.contender: row for row in summarise(lap.seconds_per_step, lap.rivals)}
        for lap in laps
    }
    present = [name for name in README_COLUMNS if any(name in row for row in rows.values())]
    lines = markdown_head(["", *(README_COLUMNS[name] for name in present)])
    lines[0] = lines[0].replace("|  |", "| |", 1)
    for workload, row in rows.items():
        cells = [_readme_cell(row.get(name)) for name in present]
        lines.append("| " + " | ".join((WORKLOADS[workload].title, *cells)) + " |")
    return "\n".join([*lines, *(f"\n{warning}" for lap in laps for warning in _warnings(lap))])


def print_memory(console: Console, rows: Sequence[MemoryRow]) -> None:
    table = Table(*MEMORY_COLUMNS, title="peak memory, bucket views on", title_justify="left")
    for cells in _memory_cells(rows):
        table.add_row(*cells)
    console.print(table)


def memory_markdown(rows: Sequence[MemoryRow]) -> str:
    lines = markdown_head(MEMORY_COLUMNS)
    lines += ["| " + " | ".join(cells) + " |" for cells in _memory_cells(rows)]
    return "\n".join(lines)


def document(
    kind: str,
    settings: dict[str, Any],
    *,
    laps: Sequence[Lap] = (),
    memory: Sequence[MemoryRow] = (),
    notes: Sequence[str] = (),
    interrupted: bool = False,
) -> dict[str, Any]:
    """The JSON document. Seconds and bytes throughout; `summary` follows from the raw values."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        **provenance(),
        "settings": settings,
        "notes": list(notes),
        "interrupted": interrupted,
        "workloads": [
            asdict(lap)
            | {"summary_rows": [asdict(r) for r in summarise(lap.seconds_per_step, lap.rivals)]}
            for lap in laps
        ],
        "memory": [asdict(row) for row in memory],
    }


def provenance() -> dict[str, Any]:
    """When, with what, and on which machine."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gradsync": _version("gradsync"),
        },
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "machine": platform.machine()},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` in one move: a reader, or a crash, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _title(lap: Lap) -> str:
    rounds = len(next(iter(complete_rounds(lap.seconds_per_step).values()), []))
    size = f"{lap.parameters:,} parameters in {lap.tensors} tensors, {lap.buffers} buffers"
    partial = "" if lap.complete else ", stopped"
    return f"{lap.workload}: {lap.summary} ({size}; {rounds} rounds{partial})"


def _cells(row: Row) -> tuple[str, ...]:
    share = "" if row.share_of_local is None else f"{row.share_of_local:.2f}"
    cells = (row.contender, f"{row.median_seconds * 1e3:.3f}", share)
    if row.ratio is None:
        return (*cells, "", "", "")
    spread = row.ratio.spread
    return (
        *cells,
        f"{row.ratio.median:.3f}",
        f"{spread.low:.3f}..{spread.high:.3f}",
        f"{row.ratio.verdict} than {row.ratio.versus}"
        if row.ratio.verdict in STYLES
        else row.ratio.verdict,
    )


def _readme_cell(row: Row | None) -> str:
    if row is None or row.ratio is None:
        return ""
    return f"{row.ratio.median:.2f} [{row.ratio.spread.low:.2f} … {row.ratio.spread.high:.2f}]"


def _warnings(lap: Lap) -> list[str]:
    return [
        f"{lap.workload}: {name} does not hold the same weights as the first DDP contender "
        "after warm-up; its times do not count"
        for name, same in lap.same_weights.items()
        if not same
    ]


def _memory_cells(rows: Sequence[MemoryRow]) -> list[tuple[str, ...]]:
    torchs = {row.workload: row.peak_growth for row in rows if row.contender == "torch-views"}
    return [
        (
            row.workload,
            row.contender,
            f"{row.parameter_bytes / 1e6:.1f}",
            f"{row.peak_growth / 1e6:.1f}",
            f"{row.peak_growth / torchs[row.workload]:.3f}" if row.workload in torchs else "",
        )
        for row in rows
    ]


def markdown_head(columns: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
