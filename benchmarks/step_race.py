"""Race one training step: torch's DistributedDataParallel against gradsync's.

    python benchmarks/step_race.py                       # all workloads, 2 ranks on gloo
    python benchmarks/step_race.py --world 1             # what wrapping alone costs
    python benchmarks/step_race.py --workloads policy,wide --json race.json --markdown
    python benchmarks/step_race.py --memory              # peak memory with bucket views
    python benchmarks/step_race.py --hooks               # compression hooks against torch's
    python benchmarks/step_race.py --shared-memory       # ours on the gradsync backend
    python benchmarks/step_race.py --rounds 15 --slot-seconds 0.25 --readme    # README's table

Contenders: "local" (no DDP: the ideal), "torch" and "gradsync" with their defaults, "torch-tuned"
and "gradsync-tuned" with gradient_as_bucket_view, static_graph and batched_grad_copy. They take
turns in one launch, one thread a rank, in an order that changes from round to round. How a
turn is timed: race/track.py. What is concluded: race/stats.py.

It starts its own ranks; under `torchrun benchmarks/step_race.py` it uses torchrun's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from race import memory, report
from race.contenders import (
    CONTENDERS,
    HOOK_RACERS,
    MEMORY_RACERS,
    RACERS,
    SHARED_MEMORY_RACERS,
    Contender,
)
from race.track import DEADLINE, Lap, Marshal, Stopped, describe, race
from race.workloads import WORKLOADS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MINIMUM_ROUNDS = 7
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if arguments.memory:
            return weigh(arguments)
        return launch(arguments.world, argv)
    join_ranks(arguments.backend)
    try:
        return send_probe(arguments) if arguments.probe else run_race(arguments)
    finally:
        leave_ranks()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(WORKLOADS)
    parser.add_argument("--workloads", type=_names(WORKLOADS), help=f"of {names} (default: all)")
    impls = ", ".join(CONTENDERS)
    parser.add_argument("--impls", type=_names(CONTENDERS), help=f"contenders, of {impls}")
    parser.add_argument("--rounds", type=int, default=9, help="default %(default)s, at least 7")
    parser.add_argument(
        "--slot-seconds", type=float, help="length of one turn (default 0.3; 0.03 with --quick)"
    )
    parser.add_argument("--world", type=int, default=2, help="ranks (default %(default)s)")
    parser.add_argument("--backend", default="gloo", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="rewritten after each workload")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table as well")
    parser.add_argument("--readme", action="store_true", help="print the README's table, only")
    parser.add_argument("--memory", action="store_true", help="compare peak memory, not time")
    parser.add_argument("--hooks", action="store_true", help="race communication hooks")
    parser.add_argument(
        "--shared-memory", action="store_true", help="race ours on the gradsync backend"
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs: any --rounds")
    parser.add_argument("--probe", type=Path, metavar="PATH", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    if arguments.rounds < (1 if arguments.quick else MINIMUM_ROUNDS):
        parser.error(f"--rounds must be {MINIMUM_ROUNDS} or more, or 1 or more with --quick")
    if arguments.world < 1:
        parser.error("--world must be 1 or more")
    if arguments.slot_seconds is None:
        arguments.slot_seconds = 0.03 if arguments.quick else 0.3
    if arguments.slot_seconds <= 0:
        parser.error("--slot-seconds must be positive")
    if arguments.memory and "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("--memory starts fresh ranks for each contender: run it without torchrun")
    weighing = arguments.memory or arguments.probe
    workloads = memory.WORKLOADS if weighing else tuple(WORKLOADS)
    arguments.workloads = arguments.workloads or workloads
    racers = HOOK_RACERS if arguments.hooks else RACERS
    if arguments.shared_memory:
        racers = SHARED_MEMORY_RACERS
    arguments.impls = arguments.impls or (MEMORY_RACERS if weighing else racers)
    return arguments


def launch(world: int, argv: list[str]) -> int:
    """Run this script on `world` ranks, as `torchrun --standalone` would, and wait for it."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun.main(["--standalone", f"--nproc-per-node={world}", __file__, *argv])
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if codes != {INTERRUPTED}:
            print(error, file=sys.stderr)
        return max(codes) if codes <= {INTERRUPTED} else 1
    return 0


def join_ranks(backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=DEADLINE)


def leave_ranks() -> None:
    """Let go of the models first: they keep the group's threads alive, in reference cycles,
    and a gloo thread that asks for the GIL while Python shuts down aborts the process.
    """
    gc.collect()
    dist.destroy_process_group()


def run_race(arguments: argparse.Namespace) -> int:
    contenders, notes = present(arguments.impls)
    board = Scoreboard(arguments, contenders, notes)
    marshal = Marshal()
    with board:
        try:
            for name in arguments.workloads:
                workload = WORKLOADS[name]
                lap = board.start(describe(workload))
                race(
                    workload,
                    contenders,
                    rounds=arguments.rounds,
                    slot_seconds=arguments.slot_seconds,
                    marshal=marshal,
                    lap=lap,
                    on_slot=board.tick,
                )
                board.save()
        except Stopped:
            board.interrupted = True
            board.save()
    board.print()
    return INTERRUPTED if board.interrupted else 0


def present(names: tuple[str, ...]) -> tuple[list[Contender], list[str]]:
    """The contenders that can race here, and why the others cannot."""
    absent = {name: CONTENDERS[name].why_absent() for name in names}
    return (
        [CONTENDERS[name] for name in names if absent[name] is None],
        [reason for reason in absent.values() if reason is not None],
    )


@dataclass
class Scoreboard:
    """Rank 0's display and result file; on the other ranks it keeps quiet."""

    arguments: argparse.Namespace
    contenders: list[Contender]
    notes: list[str]
    laps: list[Lap] = field(default_factory=list)
    interrupted: bool = False

    def __post_init__(self) -> None:
        # With --readme the table has standard output for itself.
        self.console = Console(quiet=dist.get_rank() != 0, stderr=self.arguments.readme)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> None:
        for note in self.notes:
            self.console.print(f"[yellow]{note}[/]")
        self.progress.start()

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def start(self, lap: Lap) -> Lap:
        self.laps.append(lap)
        if self.progress.disable:
            self.console.print(f"{lap.workload}: {lap.summary} ...")
        slots = self.arguments.rounds * len(self.contenders)
        self.task = self.progress.add_task(f"{lap.workload}: warming up", total=slots)
        return lap

    def tick(self, contender: str, number: int) -> None:
        description = f"{self.laps[-1].workload}: round {number + 1}, {contender}"
        done = sum(len(times) for times in self.laps[-1].seconds_per_step.values())
        self.progress.update(self.task, description=description, completed=done + 1)

    def save(self) -> None:
        if self.arguments.json and dist.get_rank() == 0:
            content = report.document(
                "step-race",
                settings(self.arguments) | {"world": dist.get_world_size()},
                laps=self.laps,
                notes=self.notes,
                interrupted=self.interrupted,
            )
            report.write_json(self.arguments.json, content)

    def print(self) -> None:
        report.print_tables(self.console, self.laps)
        if self.arguments.readme and dist.get_rank() == 0:
            print(report.readme(self.laps), flush=True)
        if self.arguments.markdown:
            self.console.print(report.markdown(self.laps), markup=False, soft_wrap=True)


def weigh(arguments: argparse.Namespace) -> int:
    """Launch fresh ranks for each workload and contender, several times, and compare peaks."""
    console = Console()
    contenders, notes = present(arguments.impls)
    for note in notes:
        console.print(f"[yellow]{note}[/]")
    rows: list[memory.MemoryRow] = []
    code = 0
    for name in arguments.workloads:
        for contender in contenders:
            console.print(f"{name}: {contender.name} ...")
            samples, code = _sample_peaks(arguments, name, contender)
            if code:
                break
            model = WORKLOADS[name].model()
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            rows.append(
                memory.MemoryRow(
                    workload=name,
                    contender=contender.name,
                    parameter_bytes=size,
                    samples=samples,
                )
            )
        if arguments.json:
            content = report.document(
                "step-memory", settings(arguments), memory=rows, notes=notes, interrupted=bool(code)
            )
            report.write_json(arguments.json, content)
        if code:
            break
    report.print_memory(console, rows)
    if arguments.markdown:
        console.print(report.memory_markdown(rows), markup=False, soft_wrap=True)
    return code


def _sample_peaks(
    arguments: argparse.Namespace, workload: str, contender: Contender
) -> tuple[tuple[int, ...], int]:
    repeats = 1 if arguments.quick else memory.REPEATS
    samples: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.json"
        probe = [f"--probe={path}", f"--workloads={workload}", f"--impls={contender.name}"]
        for _ in range(repeats):
            if code := launch(arguments.world, [*probe, f"--backend={arguments.backend}"]):
                return tuple(samples), code
            samples.append(json.loads(path.read_text()))
    return tuple(samples), 0


def send_probe(arguments: argparse.Namespace) -> int:
    """On a rank of a memory launch: measure the one contender, rank 0 writes it down."""
    (workload,), (contender,) = arguments.workloads, arguments.impls
    peak = memory.probe(CONTENDERS[contender], WORKLOADS[workload], Marshal())
    if dist.get_rank() == 0:
        arguments.probe.write_text(json.dumps(peak))
    return 0


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = ("workloads", "impls", "rounds", "slot_seconds", "world", "backend", "quick")
    return {key: getattr(arguments, key) for key in keys}


def _names(known: dict[str, Any]) -> Any:
    def parse_names(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return names

    return parse_names


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
