"""Race the collectives of the gradsync backend against gloo's and OpenMPI's.

    python benchmarks/collectives.py                            # all_reduce, 2 and 4 ranks
    python benchmarks/collectives.py --all --json race.json     # the other collectives as well
    python benchmarks/collectives.py --sizes 256kB --ranks 2 --contenders gloo,symmetric,bare
    python benchmarks/collectives.py --busy                     # CPU time when cores are busy

All contenders take turns in one launch, one thread a rank. A turn starts with a barrier, repeats
the call as often as fills it, and lasts as long as the slowest rank takes. It starts its own
ranks: with mpirun if OpenMPI and mpi4py are there, else with torchrun; then OpenMPI does not race.
Ctrl-C ends the race after the turn under way and keeps what was measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from race import collective_report as report
from race import ranks
from race.cases import BUSY, BUSY_CONTENDERS, Case, race_busy, race_collective
from race.exercises import ALL_REDUCE, CONTENDERS, COPIED, GLOO, OPENMPI, OTHERS, Groups
from race.report import write_json
from race.targets import SIZES, SIZES_OF_OTHERS
from race.track import Marshal, Stopped
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MINIMUM_ROUNDS = 7
INTERRUPTED = 130
MAXIMUM_RANKS = 64
WIDTH = 150  # of a table that does not go to a terminal
UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
BURN = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True: pass
"""  # until the one who started it is gone


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.ranks_folder is not None:
        return run_rank(arguments)
    openmpi, problem = None, None
    if OPENMPI in arguments.contenders and ALL_REDUCE in arguments.collectives:
        openmpi, problem = ranks.find_openmpi()
    board = Scoreboard(arguments, openmpi, problem)
    with board, burning(ranks.cores() if arguments.busy else 0):
        code = launch_all(arguments, board)
    board.print()
    return code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=_sizes, metavar="SIZE,...",
        help="of the tensor on a rank, as in 4kB,25MB; kB and MB are powers of 1024 (default: "
        "4kB,256kB,4MB,25MB,100MB; 4kB,4MB for the other collectives; 4MB with --busy)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=_ranks, default=(2, 4), metavar="N,...",
        help="numbers of ranks, one launch each (default 2,4)",
    )  # fmt: skip
    parser.add_argument(
        "--contenders", type=_names("contender", CONTENDERS), metavar="NAME,...",
        default=tuple(CONTENDERS),
        help="of " + "; ".join(f"{name}: {what}" for name, what in CONTENDERS.items()),
    )  # fmt: skip
    known = (ALL_REDUCE, *OTHERS)
    parser.add_argument(
        "--collectives", type=_names("collective", known), metavar="NAME,...",
        default=(ALL_REDUCE,), help=f"of {', '.join(known)} (default {ALL_REDUCE})",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="all the collectives")
    parser.add_argument(
        "--busy", action="store_true",
        help="instead: time and CPU time of training steps on cores that others compute on too",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="default 9, at least 7; 2 with --quick")
    parser.add_argument(
        "--slot-seconds", type=float, help="length of a turn (default 0.2; 0.02 with --quick)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="rewritten after each case")
    parser.add_argument("--markdown", action="store_true", help="print markdown as well")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few short turns")
    parser.add_argument("--ranks-folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    quick = arguments.quick
    if arguments.rounds is None:
        arguments.rounds = 2 if quick else 9
    if arguments.rounds < (1 if quick else MINIMUM_ROUNDS):
        parser.error(f"--rounds must be {MINIMUM_ROUNDS} or more, or 1 or more with --quick")
    if arguments.slot_seconds is None:
        arguments.slot_seconds = 0.02 if quick else 0.2
    if arguments.slot_seconds <= 0:
        parser.error("--slot-seconds must be positive")
    if arguments.busy and (arguments.all or arguments.collectives != (ALL_REDUCE,)):
        parser.error("--busy is a race of its own: run it without --all and --collectives")
    if arguments.all:
        arguments.collectives = known
    if arguments.busy:
        arguments.collectives = ()
    if arguments.ranks_folder is None and "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("it starts its own ranks, of several numbers: run it without torchrun")
    if arguments.json and arguments.json.is_dir():
        parser.error(f"--json: {arguments.json} is a directory")
    return arguments


def cases(arguments: argparse.Namespace, world: int) -> list[Case]:
    """What is raced with `world` ranks, in order."""
    if arguments.busy:
        sizes = arguments.sizes or SIZES_OF_OTHERS[-1:]
        return [Case(operation=BUSY, world=world, bytes=size) for size in sizes]
    chosen = []
    for name in arguments.collectives:
        sizes = arguments.sizes or (SIZES if name == ALL_REDUCE else SIZES_OF_OTHERS)
        if name == "barrier":
            sizes = (0,)
        chosen += [Case(operation=name, world=world, bytes=size) for size in sizes]
    return chosen


def entrants(arguments: argparse.Namespace, operation: str, *, with_mpi: bool) -> list[str]:
    """Who races in it. Only all_reduce knows more than gloo and ours."""
    if operation == BUSY:
        return list(BUSY_CONTENDERS)
    if operation != ALL_REDUCE:
        return [GLOO, COPIED]
    return [name for name in arguments.contenders if name != OPENMPI or with_mpi]


# ------------------------------------------------------------------------- above the ranks


def launch_all(arguments: argparse.Namespace, board: Scoreboard) -> int:
    """One launch for each number of ranks."""
    stop = ranks.Stop()
    options = _forwarded(arguments)
    for world in arguments.ranks:
        board.announce(world)
        code = ranks.run_ranks(
            world, Path(__file__), [*options, f"--ranks={world}"],
            with_mpi=board.openmpi is not None, stop=stop, on_message=board.hear,
        )  # fmt: skip
        if stop.asked:
            board.interrupted = True
            board.save()
            return INTERRUPTED
        if code:
            board.notes.append(f"The race with {world} ranks failed, exit code {code}.")
            board.save()
            return 1
    return 0


def _forwarded(arguments: argparse.Namespace) -> list[str]:
    options = [
        f"--contenders={','.join(arguments.contenders)}",
        f"--rounds={arguments.rounds}",
        f"--slot-seconds={arguments.slot_seconds}",
    ]
    if arguments.sizes:
        options.append(f"--sizes={','.join(map(str, arguments.sizes))}")
    if arguments.busy:
        options.append("--busy")
    else:
        options.append(f"--collectives={','.join(arguments.collectives)}")
    return [*options, "--quick"] if arguments.quick else options


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    burners = [
        subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE) for _ in range(count)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@dataclass
class Scoreboard:
    """The display and the result file."""

    arguments: argparse.Namespace
    openmpi: str | None
    problem: str | None
    cases: list[Case] = field(default_factory=list)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=WIDTH)
        self.notes = report.notes_on_machine(ranks.cores(), os.getloadavg()[0])
        if self.openmpi is not None:
            self.notes.append(f"openmpi: {self.openmpi}.")
        if self.problem is not None:
            self.notes.append(f"openmpi does not race: {self.problem}.")
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        with_mpi = self.openmpi is not None
        slots = self.arguments.rounds * sum(
            len(entrants(self.arguments, case.operation, with_mpi=with_mpi))
            for world in self.arguments.ranks
            for case in cases(self.arguments, world)
        )
        self.task = self.progress.add_task("starting ranks", total=slots)

    def __enter__(self) -> None:
        for note in self.notes:
            self.console.print(f"[yellow]{note}[/]")
        self.progress.start()

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def announce(self, world: int) -> None:
        if self.progress.disable:
            self.console.print(f"starting {world} ranks ...")
        self.progress.update(self.task, description=f"starting {world} ranks")

    def hear(self, message: Case | str) -> None:
        """From rank 0: where it is, or what it has measured."""
        if isinstance(message, Case):
            self.cases.append(message)
            self.save()
            if self.progress.disable:
                size = report.human_size(message.bytes)
                state = "done" if message.complete else "stopped"
                self.console.print(f"{message.operation}, {message.world} ranks, {size}: {state}")
        else:
            self.progress.update(self.task, description=message, advance=1)

    def save(self) -> None:
        if self.arguments.json:
            content = report.document(
                settings(self.arguments), self.cases, self.notes, interrupted=self.interrupted
            )
            write_json(self.arguments.json, content)

    def print(self) -> None:
        report.print_tables(self.console, self.cases, self.notes)
        if self.arguments.markdown:
            text = report.markdown(self.cases, self.notes)
            self.console.print(text, markup=False, soft_wrap=True)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = (
        "sizes", "ranks", "contenders", "collectives", "busy", "rounds", "slot_seconds", "quick",
    )  # fmt: skip
    return {key: getattr(arguments, key) for key in keys}


# ------------------------------------------------------------------------- on a rank


def run_rank(arguments: argparse.Namespace) -> int:
    import torch.distributed as dist

    ranks.join_ranks(arguments.ranks_folder)
    with_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    reporter = ranks.Reporter(arguments.ranks_folder)
    groups = Groups.build(with_mpi=with_mpi)
    marshal = Marshal(reporter.is_asked_to_stop)
    race = race_busy if arguments.busy else race_collective
    for case in cases(arguments, dist.get_world_size()):
        title = f"{case.operation}, {case.world} ranks, {report.human_size(case.bytes)}"
        try:
            race(
                case,
                entrants(arguments, case.operation, with_mpi=with_mpi),
                groups,
                rounds=arguments.rounds,
                slot_seconds=arguments.slot_seconds,
                marshal=marshal,
                on_slot=lambda name, number: reporter.send(
                    f"{title}: round {number + 1}, {name}"  # noqa: B023
                ),
            )
        except Stopped:
            reporter.send(case)
            break
        reporter.send(case)
    del groups
    gc.collect()
    dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------------- arguments


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in _parts(text):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", part.lower())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is no size; write 4096, 4kB or 25MB")
        size = int(float(match[1]) * UNITS[match[2]])
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"{part!r} is no whole number of float32")
        sizes.append(size)
    return tuple(sizes)


def _ranks(text: str) -> tuple[int, ...]:
    if not all(part.isdigit() and 2 <= int(part) <= MAXIMUM_RANKS for part in _parts(text)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: numbers of ranks are 2 to {MAXIMUM_RANKS}, as in 2,4"
        )
    return tuple(int(part) for part in _parts(text))


def _names(kind: str, known: Sequence[str] | dict[str, str]) -> Any:
    def parse_names(text: str) -> tuple[str, ...]:
        names = tuple(_parts(text))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"no such {kind}: {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return names

    return parse_names


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError("it is empty")
    return parts


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
