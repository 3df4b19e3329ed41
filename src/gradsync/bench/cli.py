"""The command ``gradsync``: parse, run, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console

import gradsync
from gradsync import ArgumentError, UsageError
from gradsync.bench import compare, files, report, tables, workloads
from gradsync.bench.board import comm_cases_of
from gradsync.bench.comm import COLLECTIVES
from gradsync.bench.contenders import DEFAULT, DTYPES, IMPLEMENTATIONS
from gradsync.bench.hybrid_race import BOTH, OURS, REFERENCE, STYLES, HybridHeat, contenders
from gradsync.bench.hybrid_sheet import sheets_of as hybrid_sheets_of
from gradsync.bench.hybrid_styles import Shape
from gradsync.bench.machine import describe_machine
from gradsync.bench.plan import BUCKET_CAP_MB, Place, Settings, plan, plan_comm
from gradsync.bench.result import BENCH, BENCH_COMM, BENCH_HYBRID, Result
from gradsync.bench.runner import FAILED, USAGE, Ranks, find_place, is_under_torchrun, run

HOOKS = gradsync.hooks.names()
BACKENDS = tuple(name for name in dist.Backend.backend_list if name not in ("undefined", "fake"))

app = typer.Typer(
    name="gradsync",
    help="Measure data-parallel training, compare two runs, draw them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Time training steps: workloads × ranks × implementations.")
app.add_typer(bench_app, name="bench", invoke_without_command=True)


def main() -> None:
    """The entry point. Mistakes of the user end with a message and exit code 2."""
    try:
        app()
    except UsageError as error:
        print(f"gradsync: {error}", file=sys.stderr)
        sys.exit(USAGE)


def _names(*known: str) -> Callable[[list[str]], list[str]]:
    """Repeated or with commas; each must be known, if any are."""

    def parse(values: list[str]) -> list[str]:
        names = [name.strip() for value in values for name in value.split(",") if name.strip()]
        if unknown := [name for name in names if known and name not in known]:
            raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def _counts(values: list[str]) -> list[str]:
    names = _names()(values)
    if wrong := [name for name in names if not name.isdecimal() or int(name) < 1]:
        raise typer.BadParameter(f"not a number of 1 or more: {', '.join(wrong)}")
    return names


def _one_of(*known: str) -> Callable[[str | None], str | None]:
    def parse(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise typer.BadParameter(f"unknown: {value}; known: {', '.join(known)}")
        return value

    return parse


RanksOption = Annotated[
    list[str],
    typer.Option("--ranks", callback=_counts, help="Numbers of ranks; default 1, 2, 4 … as fit."),
]
BackendOption = Annotated[
    list[str],
    typer.Option("--backend", callback=_names(*BACKENDS), help=f"Of {', '.join(BACKENDS)}."),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results here, anew after each case."),
]
FormatOption = Annotated[
    str, typer.Option("--format", callback=_one_of(*tables.FORMATS), help="|".join(tables.FORMATS))
]
OversubscribeOption = Annotated[
    bool, typer.Option("--oversubscribe", help="Allow more ranks than the machine has room for.")
]


@bench_app.callback()
def bench(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Option(
            callback=_names(),
            help=f"{', '.join(workloads.BUILT_IN)}, or a classifier of torchvision. Default: with "
            f"torchvision {', '.join(workloads.TORCHVISION_DEFAULTS)}, else the built-in ones.",
        ),
    ] = [],  # noqa: B006
    benchmark: Annotated[
        list[str], typer.Option(metavar="FILE:CLASS", help="Your own subclass of Benchmark.")
    ] = [],  # noqa: B006
    ranks: RanksOption = [],  # noqa: B006
    impl: Annotated[
        list[str],
        typer.Option(callback=_names(*IMPLEMENTATIONS), help=f"Of {', '.join(IMPLEMENTATIONS)}."),
    ] = list(DEFAULT),  # noqa: B006
    backend: BackendOption = [],  # noqa: B006
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of one rank; default: the workload's own.")
    ] = None,
    bucket_size: Annotated[float, typer.Option(help="MB, the cap of a bucket.")] = BUCKET_CAP_MB,
    dtype: Annotated[
        str, typer.Option(callback=_one_of(*DTYPES), help=f"Of {', '.join(DTYPES)}.")
    ] = "float32",
    comm_hook: Annotated[
        str | None,
        typer.Option(callback=_one_of(*HOOKS), help=f"Of {', '.join(HOOKS)}."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each case.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Turns into which they are split.")] = 10,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before, not measured.")] = 5,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1,
    json: JsonOption = None,
    format: FormatOption = "table",
    oversubscribe: OversubscribeOption = False,
    allow_differences: Annotated[
        bool, typer.Option("--allow-differences", help="Under torchrun: hosts need not be alike.")
    ] = False,
) -> None:
    """Time training steps: workloads × ranks × implementations, which take turns.

    It starts its own ranks. On many hosts: torchrun … -m gradsync.bench bench ….
    """
    if context.invoked_subcommand is not None:
        return
    notes = []
    specs = [*model, *benchmark]
    if not specs:
        specs = list(workloads.default_models())
        if not workloads.has_torchvision():
            notes.append(
                "torchvision is not installed: measuring the built-in models "
                "(pip install 'gradsync[vision]' for resnet50 and others)"
            )
    settings = Settings(
        workloads=tuple(specs),
        worlds=tuple(int(each) for each in ranks) or None,
        implementations=tuple(impl),
        backends=tuple(backend) or None,
        batch_size=batch_size,
        bucket_cap_mb=bucket_size,
        comm_hook=comm_hook,
        dtype=dtype,
        steps=steps,
        rounds=min(rounds, steps),
        warm_up=warm_up,
        seed=seed,
        threads=threads,
    )
    place = find_place(threads=threads, oversubscribe=oversubscribe)
    heats, failed = plan(settings, place)
    used = dict.fromkeys(name for heat in heats for name in heat.backends)
    result = Result(
        kind=BENCH,
        distributed_backend=",".join(used),
        bucket_size=bucket_size,
        notes=notes,
        cases=failed,
    )
    _finish(heats, result, path=json, how=format, allow_differences=allow_differences)


@bench_app.command("hybrid")
def bench_hybrid(
    trainers: Annotated[int, typer.Option(min=1, help="Processes that train under DDP.")] = 2,
    servers: Annotated[int, typer.Option(min=1, help="Parameter servers.")] = 4,
    embeddings: Annotated[int, typer.Option(min=1, help="Rows of the table on a server.")] = 300,
    embedding_dim: Annotated[int, typer.Option(min=1, help="Its columns.")] = 16,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Bags; default: as torch's script draws them, about 7."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Of ten batches, in a round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each style; 5 for a verdict.")] = 10,
    warmup: Annotated[
        int, typer.Option("--warmup", "--warm-up", min=1, help="Epochs before, not measured.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of each process.")] = 1,
    style: Annotated[
        str,
        typer.Option(
            callback=_one_of(*STYLES),
            help=f"{OURS}: gradsync.hybrid; {REFERENCE}: RPC to one server after the other, "
            f"distributed autograd, DistributedOptimizer; {BOTH}: in turns.",
        ),
    ] = BOTH,
    backend: Annotated[
        str, typer.Option(callback=_one_of(*BACKENDS), help="Of our trainers' DDP.")
    ] = "gradsync",
    json: JsonOption = None,
    format: FormatOption = "table",
) -> None:
    """Time hybrid training: tables on parameter servers, a network under DDP on the trainers.

    The model is that of torch's benchmark_ddp_rpc.py. Our way and the plain one take turns in one
    run; the processes of the one stand still while the other runs. All of them are on this host.
    """
    if is_under_torchrun():
        raise ArgumentError("gradsync bench hybrid starts its own processes: leave torchrun away")
    shape = Shape(
        trainers=trainers,
        servers=servers,
        embeddings=embeddings,
        embedding_dim=embedding_dim,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
    )
    heat = HybridHeat(
        shape=shape,
        contenders=contenders(style, backend),
        warm_up=warmup,
        epochs=epochs,
        rounds=rounds,
    )
    result = Result(kind=BENCH_HYBRID, distributed_backend=",".join(heat.backends))
    _finish([heat], result, path=json, how=format, allow_differences=False)


@app.command("bench-comm")
def bench_comm(
    collective: Annotated[
        list[str],
        typer.Option(callback=_names(*COLLECTIVES), help=f"Of {', '.join(COLLECTIVES)}."),
    ] = list(COLLECTIVES),  # noqa: B006
    size: Annotated[
        list[str], typer.Option(callback=_names(), help="Bytes, as 4k or 16M; default 4k … 16M.")
    ] = ["4k,64k,1M,16M"],  # noqa: B006
    ranks: RanksOption = [],  # noqa: B006
    backend: BackendOption = ["gloo,gradsync"],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each backend.")] = 10,
    warm_up: Annotated[int, typer.Option(min=0, help="Calls before, not measured.")] = 5,
    turn_seconds: Annotated[float, typer.Option(min=1e-6, help="The length of a turn.")] = 0.05,
    json: JsonOption = None,
    format: FormatOption = "table",
    oversubscribe: OversubscribeOption = False,
    allow_differences: Annotated[
        bool, typer.Option("--allow-differences", help="Under torchrun: hosts need not be alike.")
    ] = False,
) -> None:
    """Time collectives: operations × sizes × backends, which take turns."""
    place: Place = find_place(oversubscribe=oversubscribe)
    heats, failed = plan_comm(
        collectives=collective,
        sizes=[parse_size(each) for each in size],
        backends=backend,
        worlds=[int(each) for each in ranks] or None,
        place=place,
        rounds=rounds,
        warm_up=warm_up,
        turn_seconds=turn_seconds,
    )
    cannot = [case for heat, error in failed for case in comm_cases_of(heat, error=error)]
    result = Result(kind=BENCH_COMM, distributed_backend=",".join(backend), comm_cases=cannot)
    _finish(heats, result, path=json, how=format, allow_differences=allow_differences)


@app.command("diff")
def diff(
    baseline: Annotated[Path, typer.Argument(help="Of gradsync bench or torch's benchmark.py.")],
    test: Annotated[Path, typer.Argument(help="The same, to compare with it.")],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Exit with 1 if a case is surely slower, by more than this."
        ),
    ] = None,
    format: FormatOption = "table",
) -> None:
    """Compare two files, case by case."""
    limit = None if fail_if_slower is None else compare.parse_percent(fail_if_slower)
    comparison = compare.compare(files.read(baseline), files.read(test))
    sheets = compare.sheets_of(comparison)
    if format == "json":
        print(files.dumps(asdict(comparison)))
    elif format == "csv":
        print(tables.csv_text([sheet for sheet in sheets if sheet.columns == compare.COLUMNS]))
    else:
        tables.show(sheets, format)
    if limit is None:
        return
    slower = comparison.slower_than(limit)
    for row in slower:
        print(
            f"gradsync: {row['title']}, {row['ranks']} ranks, {row['case']} is slower by "
            f"{-row['median_change']:.1f} % (more than {limit:g} %)",
            file=sys.stderr,
        )
    if slower:
        raise typer.Exit(FAILED)


@app.command("report")
def report_page(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Files of gradsync bench, bench hybrid or bench-comm, or of torch's benchmark.py. "
            "A run is compared with the first one before it that has cases in common with it.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page; a file that is there is replaced.")
    ] = Path("report.html"),
    png: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write each plot here as a PNG file too."),
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = report.TITLE,
) -> None:
    """Draw results as one page that needs no network: plots, tables, facts about the machine.

    It opens in any browser, in light and dark, on a phone, and without scripts (which only sort).
    """
    written = report.write_report(results, output, pngs=png, title=title)
    print(f"{written.page}: {written.figures} plots")
    if png is not None:
        print(f"{png}: {len(written.pngs)} PNG files")
    if not written.figures:
        print("gradsync: the files hold no measurements: nothing to draw", file=sys.stderr)
        raise typer.Exit(FAILED)


def parse_size(text: str) -> int:
    """Bytes as people write them.

    >>> parse_size("4k"), parse_size("1M"), parse_size("100")
    (4096, 1048576, 100)
    """
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    lower = text.lower().removesuffix("b")
    number, factor = (lower[:-1], units[lower[-1]]) if lower[-1:] in units else (lower, 1)
    if not number.isdecimal() or int(number) < 1:
        raise ArgumentError(f"{text!r} is not a size; write bytes, as 4096, 4k or 16M")
    return int(number) * factor


def _finish(
    heats: Sequence[Any], result: Result, *, path: Path | None, how: str, allow_differences: bool
) -> None:
    """Run the heats, print the tables, exit with the code."""
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ArgumentError(f"--json {path}: {path.parent} is not a folder that can be written to")
    if is_under_torchrun():
        with Ranks() as world:
            facts = world.check_hosts(allow_differences=allow_differences)
            console = Console(stderr=True, quiet=world.rank != 0)
            result.header = facts
            _print_header(result, console)
            result, code = world.run(heats, result, path=path, console=console)
            is_silent = world.rank != 0
    else:
        console = Console(stderr=True)
        result.header = describe_machine()
        _print_header(result, console)
        result, code = run(heats, result, path=path, console=console)
        is_silent = False
    if not is_silent:
        sheets_of = hybrid_sheets_of if result.kind == BENCH_HYBRID else tables.sheets_of
        tables.show(sheets_of(result), how, status=result.status)
    raise typer.Exit(code)


def _print_header(result: Result, console: Console) -> None:
    for key, value in result.header.items():
        if key == "topology":
            continue
        console.print(f"* {key}: {value}", markup=False, highlight=False)
    for name, value in (
        ("backends", result.distributed_backend),
        ("bucket MB", result.bucket_size),
    ):
        console.print(f"* {name}: {value}", markup=False, highlight=False)
    console.print(f"\n{result.header.get('topology', '')}\n", markup=False, highlight=False)
    for note in result.notes:
        console.print(note, style="yellow", markup=False)
