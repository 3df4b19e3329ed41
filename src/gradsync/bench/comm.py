"""``gradsync bench-comm``: collectives × sizes, the backends in turns.

Bytes are counted as nccl-tests count them: those of the larger of a rank's input and output. A
call's time is that of the slowest rank, in a series of calls between two barriers.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.bench.meeting import Meeting, turns

ITEM: Final = 4  # float32
CALIBRATION_SHARE: Final = 0.25  # of a turn
FEWEST_CALLS: Final = 3


@dataclass(frozen=True, kw_only=True)
class CommHeat:
    """One collective of one size on one number of ranks, for all backends."""

    collective: str
    bytes: int
    world: int
    backends: tuple[str, ...]
    rounds: int = 10
    warm_up: int = 5
    turn_seconds: float = 0.05
    threads: int = 1

    @property
    def count(self) -> int:
        """Elements of the larger of input and output: a multiple of the ranks."""
        shares = self.collective in _SHARED
        return max(1, self.bytes // (ITEM * self.world)) * self.world if shares else self.items

    @property
    def items(self) -> int:
        """Elements that the bytes make, without regard to the ranks."""
        return max(1, self.bytes // ITEM)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """A collective made ready: ``run`` calls it, ``is_right`` looks at the first call's result."""

    run: Callable[[], object]
    is_right: Callable[[], bool]


def run_comm_heat(
    heat: CommHeat, meeting: Meeting, device: torch.device, emit: Callable[[dict[str, Any]], None]
) -> None:
    """Run it, on one of its ranks. Events go to ``emit`` on rank 0, see runner.py."""
    torch.set_num_threads(heat.threads)
    if meeting.rank != 0:
        emit = _ignore
    exercises, calls = [], []
    for index, backend in enumerate(heat.backends):
        emit({"event": "building", "contender": index})
        exercise = prepare(heat, meeting, meeting.groups[backend], device)
        exercise.run()
        correct = all(meeting.gather(exercise.is_right()))
        for _ in range(heat.warm_up):
            exercise.run()
        exercises.append(exercise)
        calls.append(_calibrate(exercise, heat.turn_seconds, meeting))
        ready = {"event": "calibrated", "contender": index, "correct": correct}
        emit({**ready, "repetitions": calls[-1]})
    for number in range(heat.rounds):
        gc.collect(1)
        for index in turns(range(len(exercises)), number):
            emit({"event": "turn", "contender": index, "round": number})
            exercises[index].run()
            seconds = max(meeting.gather(_time(exercises[index], calls[index], meeting)))
            measured = {"event": "timed", "contender": index, "round": number}
            emit({**measured, "seconds": seconds / calls[index]})


def prepare(
    heat: CommHeat, meeting: Meeting, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    """The collective on this rank; rank r's input is r + 1 throughout."""
    return _COLLECTIVES[heat.collective](heat.count, meeting.rank, heat.world, group, device)


def _all_reduce(
    count: int, rank: int, world: int, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    tensor = torch.full((count,), float(rank + 1), device=device)
    return Exercise(
        run=partial(dist.all_reduce, tensor, group=group),
        is_right=lambda: _is(tensor, world * (world + 1) / 2),
    )


def _broadcast(
    count: int, rank: int, world: int, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    tensor = torch.full((count,), float(rank + 1), device=device)
    return Exercise(
        run=partial(dist.broadcast, tensor, src=0, group=group), is_right=lambda: _is(tensor, 1)
    )


def _reduce(
    count: int, rank: int, world: int, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    tensor = torch.full((count,), float(rank + 1), device=device)
    return Exercise(
        run=partial(dist.reduce, tensor, dst=0, group=group),
        is_right=lambda: rank != 0 or _is(tensor, world * (world + 1) / 2),
    )


def _all_gather(
    count: int, rank: int, world: int, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    own = torch.full((count // world,), float(rank + 1), device=device)
    out = torch.zeros(count, device=device)
    return Exercise(
        run=partial(dist.all_gather_into_tensor, out, own, group=group),
        is_right=lambda: all(_is(part, r + 1) for r, part in enumerate(out.chunk(world))),
    )


def _reduce_scatter(
    count: int, rank: int, world: int, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    own = torch.full((count,), float(rank + 1), device=device)
    out = torch.zeros(count // world, device=device)
    return Exercise(
        run=partial(dist.reduce_scatter_tensor, out, own, group=group),
        is_right=lambda: _is(out, world * (world + 1) / 2),
    )


def _all_to_all(
    count: int, rank: int, world: int, group: dist.ProcessGroup, device: torch.device
) -> Exercise:
    own = torch.full((count,), float(rank + 1), device=device)
    out = torch.zeros(count, device=device)
    return Exercise(
        run=partial(dist.all_to_all_single, out, own, group=group),
        is_right=lambda: all(_is(part, r + 1) for r, part in enumerate(out.chunk(world))),
    )


_COLLECTIVES: Final = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
}
COLLECTIVES: Final = tuple(_COLLECTIVES)
_SHARED: Final = ("all_gather", "reduce_scatter", "all_to_all")  # a part for each rank


def _is(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def _calibrate(exercise: Exercise, turn_seconds: float, meeting: Meeting) -> int:
    """Calls that fill a turn; equal on all ranks because the measured time is."""
    calls = 1
    while True:
        seconds = max(meeting.gather(_time(exercise, calls, meeting)))
        if seconds >= CALIBRATION_SHARE * turn_seconds:
            return max(FEWEST_CALLS, math.ceil(turn_seconds * calls / seconds))
        calls *= 2


def _time(exercise: Exercise, calls: int, meeting: Meeting) -> float:
    run = exercise.run
    meeting.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def _ignore(event: dict[str, Any]) -> None:
    pass
