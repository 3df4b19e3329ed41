"""Run the heats: in ranks that we launch, or in those that torchrun has started.

[Note: two ways to run]
Alone, every workload and number of ranks has a launch of its own, so a rank that dies takes only
its heat along. Under torchrun (many hosts) the ranks are there already: a heat uses the first
ones, the others wait, and all of them meet after each heat to learn how it went.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console

from gradsync import ArgumentError
from gradsync.bench.board import Board
from gradsync.bench.comm import CommHeat
from gradsync.bench.launch import AnyHeat, Stop, describe, launch, own_device, run_any
from gradsync.bench.machine import cores, describe_machine, differences
from gradsync.bench.meeting import Meeting, Stopped
from gradsync.bench.plan import Place
from gradsync.bench.result import Result

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # as a shell has it for Ctrl-C
PATIENCE: Final = timedelta(hours=12)  # of ranks that are not in a heat, for those that are


def is_under_torchrun() -> bool:
    """Has torchrun started us as one of its ranks?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def find_place(*, threads: int = 1, oversubscribe: bool = False) -> Place:
    """Where the ranks can be: torchrun's, the GPUs, or the cores.

    >>> find_place(oversubscribe=True).why_not(100)
    """
    is_cuda = torch.cuda.is_available()
    if is_under_torchrun():
        world, host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        why = f"torchrun started {world}"
        return Place(slots=world, host_slots=host, is_cuda=is_cuda, why=why)
    if is_cuda:
        count = torch.cuda.device_count()
        return Place(slots=count, is_cuda=True, why=f"this machine has {count} GPUs")
    slots = max(1, cores() // threads)
    each = "" if threads == 1 else f", and each rank has {threads} threads"
    why = f"this machine has {cores()} cores{each} (--oversubscribe runs them all the same)"
    return Place(slots=slots, allows_more=oversubscribe, why=why)


def run(
    heats: Sequence[AnyHeat], result: Result, *, path: Path | None, console: Console
) -> tuple[Result, int]:
    """Run all heats; the result, which is in the file too, and the exit code."""
    result.pytorch_version = torch.__version__
    result.cuda_version = torch.version.cuda
    result.command = shlex.join(["gradsync", *sys.argv[1:]])
    board = Board(result, heats, console=console, path=path)
    with Stop() as stop, board:
        _run_launched(heats, board, stop)
        board.finish(is_interrupted=stop.is_asked())
    if stop.is_asked():
        return result, INTERRUPTED
    return result, FAILED if result.failed else 0


def _run_launched(heats: Sequence[AnyHeat], board: Board, stop: Stop) -> None:
    for pending in _launches(heats):
        while pending and not stop.is_asked():
            now = pending

            def on_event(number: int, event: dict[str, Any], now: list[int] = now) -> None:
                board.handle(now[number], event)

            failure = launch([heats[index] for index in now], stop=stop, on_event=on_event)
            pending = [index for index in now if not board.is_done(index)]
            if failure is not None and pending:
                board.fail(pending[0], failure.message)
            elif pending and not stop.is_asked():
                board.fail(pending[0], "the ranks ended early, and did not say why")
            pending = pending[1:]


def _launches(heats: Sequence[AnyHeat]) -> Iterable[list[int]]:
    """The heats of each launch: a workload has its own; collectives of one world share it."""

    def key(index: int) -> tuple[int, int]:
        heat = heats[index]
        return heat.world, -1 if isinstance(heat, CommHeat) else index

    for _, group in groupby(range(len(heats)), key):
        yield list(group)


# ------------------------------------------------------------------------- under torchrun


class Ranks:
    """The ranks that torchrun has started, of which this is one."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.device = own_device()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        dist.destroy_process_group()

    def check_hosts(self, *, allow_differences: bool) -> dict[str, Any]:
        """The facts of host 0; an error on all ranks if another host has other ones."""
        is_first = int(os.environ["LOCAL_RANK"]) == 0
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, describe_machine() if is_first else None)
        hosts = [facts for facts in every if facts is not None]
        if (found := differences(hosts)) and not allow_differences:
            raise ArgumentError(
                "the hosts are not alike (--allow-differences measures all the same):\n"
                + "\n".join(found)
            )
        return {**hosts[0], "hosts": len(hosts)}

    def run(
        self, heats: Sequence[AnyHeat], result: Result, *, path: Path | None, console: Console
    ) -> tuple[Result, int]:
        """As the other ``run``, on this rank; rank 0 displays and saves."""
        result.pytorch_version = torch.__version__
        result.cuda_version = torch.version.cuda
        result.command = shlex.join(["gradsync", *sys.argv[1:]])
        board = Board(result, heats, console=console, path=path if self.rank == 0 else None)
        meetings: dict[tuple[int, tuple[str, ...]], Meeting] = {}
        is_stopped = has_failed = False
        with Stop() as stop, board:
            for index, heat in enumerate(heats):
                error, stopped = self._take_part(index, heat, meetings, board, stop)
                every: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(every, (error, stopped))
                is_stopped = any(stopped for _, stopped in every)
                if errors := [error for error, _ in every if error is not None]:
                    has_failed = True
                    meetings.pop((heat.world, heat.backends), None)
                    board.fail(index, min(errors)[1])
                if is_stopped:
                    break
            board.finish(is_interrupted=is_stopped)
        if is_stopped:
            return result, INTERRUPTED
        return result, FAILED if has_failed or result.failed else 0

    def _take_part(
        self,
        index: int,
        heat: AnyHeat,
        meetings: dict[tuple[int, tuple[str, ...]], Meeting],
        board: Board,
        stop: Stop,
    ) -> tuple[tuple[float, str] | None, bool]:
        """When and how it failed here, if it did; and whether it was stopped."""
        try:
            key = heat.world, heat.backends
            if key not in meetings:
                meetings[key] = Meeting(*key, is_asked_to_stop=stop.is_asked)
            if self.rank < heat.world:
                on_event = partial(board.handle, index)
                run_any(heat, meetings[key], self.device, on_event)
        except Stopped:
            return None, True
        except Exception as error:
            return (time.time(), describe(error, self.rank)), stop.is_asked()
        return None, stop.is_asked()
