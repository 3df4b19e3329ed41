"""One case of the collectives' race: an operation, a size, a number of ranks, all contenders.

The slots are those of track.py: a barrier, then the repetitions, and the slowest rank's time.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.bench.meeting import turns
from race.exercises import COPIED, DTYPE, GLOO, SYMMETRIC, Groups, prepare
from race.track import MINIMUM_STEPS, Marshal, calibrate

WARM_UP = 5
OVERRUN = 3  # times as long as wanted: who spins may be a thousand times slower when disturbed
BUSY = "busy step"
COMPUTE = "compute alone"
BUSY_CONTENDERS = (COMPUTE, GLOO, SYMMETRIC, COPIED)
MATRIX = 256  # computing means multiplying matrices of this order
LATE = 3  # times as much computing as the others do has the rank that is late

OnSlot = Callable[[str, int], None]


@dataclass(kw_only=True)
class Case:
    """What was measured so far. Seconds are those of one repetition, one value a round."""

    operation: str
    world: int
    bytes: int
    repetitions: dict[str, int] = field(default_factory=dict)  # in the last slot
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)  # busy: of all ranks
    is_right: dict[str, bool] = field(default_factory=dict)
    complete: bool = False

    @property
    def count(self) -> int:
        return max(1, self.bytes // DTYPE.itemsize)


def race_collective(
    case: Case,
    contenders: Sequence[str],
    groups: Groups,
    *,
    rounds: int,
    slot_seconds: float,
    marshal: Marshal,
    on_slot: OnSlot,
) -> None:
    """Fill `case`. It holds all finished slots also when this is left by `Stopped`."""
    exercises = [prepare(case.operation, name, case.count, groups) for name in contenders]
    for exercise in exercises:
        exercise.fill()
        marshal.time(partial(exercise.run, 1))
        is_wrong = marshal.agree(float(not exercise.is_right()))[0]
        case.is_right[exercise.contender] = not is_wrong
        marshal.time(partial(exercise.run, WARM_UP))
    for exercise in exercises:
        name = exercise.contender
        case.repetitions[name] = calibrate(exercise.run, slot_seconds, marshal)
        case.seconds[name] = []
    for number in range(rounds):
        for exercise in turns(exercises, number):
            name = exercise.contender
            on_slot(name, number)
            gc.collect()
            exercise.run(1)
            repetitions = case.repetitions[name]
            seconds = marshal.time(partial(exercise.run, repetitions))
            case.seconds[name].append(seconds / repetitions)
            if seconds > OVERRUN * slot_seconds:
                shorter = int(repetitions * slot_seconds / seconds)
                case.repetitions[name] = max(MINIMUM_STEPS, shorter)
    case.complete = True


# ------------------------------------------------------------------------- busy cores


def race_busy(
    case: Case,
    contenders: Sequence[str],
    groups: Groups,
    *,
    rounds: int,
    slot_seconds: float,
    marshal: Marshal,
    on_slot: OnSlot,
) -> None:
    """Steps of training on cores that others compute on too: their time, and the CPU's."""
    steps = {name: BusyStep(name, case.count, groups) for name in contenders}
    for step in steps.values():
        marshal.time(partial(step.run, WARM_UP))
    # All do the same number of steps, a multiple of the ranks: each is late as often.
    wanted = max(calibrate(step.run, slot_seconds, marshal) for step in steps.values())
    repetitions = -(-wanted // case.world) * case.world
    for name in steps:
        case.repetitions[name] = repetitions
        case.seconds[name], case.cpu_seconds[name] = [], []
    for number in range(rounds):
        for name in turns(list(steps), number):
            on_slot(name, number)
            gc.collect()
            steps[name].run(case.world)
            seconds = marshal.time(partial(steps[name].run_and_account, repetitions))
            cpu = torch.tensor([steps[name].cpu_seconds], dtype=torch.float64)
            dist.all_reduce(cpu, group=marshal.group)
            case.seconds[name].append(seconds / repetitions)
            case.cpu_seconds[name].append(cpu.item() / repetitions)
    case.complete = True


class BusyStep:
    """Compute, start the all-reduce, compute on, wait. In turn a rank is late; the others wait."""

    def __init__(self, contender: str, count: int, groups: Groups) -> None:
        self._start: Callable[[Tensor], dist.Work | None] = lambda tensor: None
        self._tensor = torch.zeros(count, dtype=DTYPE)
        if contender != COMPUTE:
            group = groups.gloo if contender == GLOO else groups.gradsync
            op = dist.ReduceOp.SUM if contender == GLOO else dist.ReduceOp.AVG
            self._start = partial(dist.all_reduce, op=op, group=group, async_op=True)
        if contender == SYMMETRIC:
            self._tensor = groups.gradsync.symmetric_empty(count, DTYPE).zero_()
        self._matrix = torch.full((MATRIX, MATRIX), 1 / MATRIX)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._number = 0
        self.cpu_seconds = 0.0

    def run_and_account(self, steps: int) -> None:
        before = _cpu_seconds()
        self.run(steps)
        self.cpu_seconds = _cpu_seconds() - before

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._number += 1
            is_late = self._number % self._world == self._rank
            self._compute(LATE if is_late else 1)
            work = self._start(self._tensor)
            self._compute(1)
            if work is not None:
                work.wait()

    def _compute(self, times: int) -> None:
        for _ in range(times):
            self._matrix @ self._matrix


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
