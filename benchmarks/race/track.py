"""The race itself, as every rank runs it: warm up, calibrate, then rounds of slots.

[Note: a slot]
A slot is one contender's turn in a round: one untimed step (its weights come back into the
caches), a barrier, then as many timed steps as calibration gave it, never fewer than 3. The
slot's time is the maximum over the ranks, because training goes on when the slowest rank is
done; it matters for "local", whose ranks do not wait for each other. Barriers and times travel
on a gloo group of their own, so they do not depend on the backend under test.

[Note: stopping]
Ctrl-C sets a flag. The flag travels with the slot's time, so all ranks leave the race after the
same slot, without tearing a collective apart, and what was measured stands.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from gradsync.bench.meeting import turns
from race.contenders import Contender, Training
from race.workloads import Workload

DEADLINE = timedelta(minutes=3)
WARM_UP_STEPS = 6  # torch and gradsync rebuild their buckets after the first backward
CALIBRATION_SHARE = 0.25  # of a slot
MINIMUM_STEPS = 3  # in a slot, however slow the workload


@dataclass(kw_only=True)
class Lap:
    """What was measured on one workload so far."""

    workload: str
    summary: str
    parameters: int
    tensors: int
    buffers: int
    steps: dict[str, int] = field(default_factory=dict)
    seconds_per_step: dict[str, list[float]] = field(default_factory=dict)
    same_weights: dict[str, bool] = field(default_factory=dict)
    rivals: dict[str, str] = field(default_factory=dict)
    complete: bool = False


class Stopped(Exception):
    """The user stopped the race; all ranks raise it after the same slot."""


class Marshal:
    """Keeps the ranks together: the start, the clock, and the stop.

    `is_asked_to_stop` is for those whom Ctrl-C does not reach: it is called between slots.
    """

    def __init__(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        self.group = dist.new_group(backend="gloo", timeout=DEADLINE)
        self._is_asked_to_stop = is_asked_to_stop
        self._stop = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._ask_to_stop)

    def time(self, run: Callable[[], None]) -> float:
        """Seconds that the slowest rank took for `run`, all having started together."""
        dist.barrier(group=self.group)
        start = time.perf_counter()
        run()
        own = time.perf_counter() - start
        seconds, stop = self.agree(own, float(self._stop or self._is_asked_to_stop()))
        if stop:
            raise Stopped
        return seconds

    def agree(self, *values: float) -> list[float]:
        """The maximum of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        agreed: list[float] = tensor.tolist()
        return agreed

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop = True


def race(
    workload: Workload,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    slot_seconds: float,
    marshal: Marshal,
    lap: Lap,
    on_slot: Callable[[str, int], None],
) -> None:
    """Fill `lap`. It holds all finished slots also when this is left by `Stopped`."""
    batches = workload.batches(dist.get_rank())
    trainings = [Training(contender, workload, batches) for contender in contenders]
    for training in trainings:
        marshal.time(lambda: training.run(WARM_UP_STEPS))  # noqa: B023
    lap.same_weights.update(_compare_weights(trainings, marshal))
    lap.rivals.update({each.name: each.rival for each in contenders if each.rival is not None})
    for training in trainings:
        name = training.contender.name
        lap.steps[name] = calibrate(training.run, slot_seconds, marshal)
        lap.seconds_per_step[name] = []
    for number in range(rounds):
        for training in turns(trainings, number):
            name = training.contender.name
            on_slot(name, number)
            steps = lap.steps[name]
            gc.collect()
            training.run(1)
            seconds = marshal.time(lambda: training.run(steps))  # noqa: B023
            lap.seconds_per_step[name].append(seconds / steps)
    lap.complete = True


def describe(workload: Workload) -> Lap:
    model = workload.model()
    parameters = list(model.parameters())
    return Lap(
        workload=workload.name,
        summary=workload.summary,
        parameters=sum(p.numel() for p in parameters),
        tensors=len(parameters),
        buffers=len(list(model.buffers())),
    )


def calibrate(run: Callable[[int], None], slot_seconds: float, marshal: Marshal) -> int:
    """Steps that fill a slot; equal on all ranks because the measured time is."""
    steps = 1
    while True:
        seconds = marshal.time(lambda: run(steps))  # noqa: B023
        if seconds >= CALIBRATION_SHARE * slot_seconds:
            return max(MINIMUM_STEPS, math.ceil(slot_seconds * steps / seconds))
        steps *= 2


def _compare_weights(trainings: Sequence[Training], marshal: Marshal) -> dict[str, bool]:
    """Whether each DDP contender holds the first one's weights, on all ranks.

    A contender that skips work must not win by it. One with a hook that compresses has weights
    of its own, and must only have the same on all ranks.
    """
    synced = [training for training in trainings if training.contender.module is not None]
    if not synced:
        return {}
    expected: list[torch.Tensor] = []
    verdicts = {}
    for training in synced:
        if not expected or training.contender.hook is not None:
            expected = [p.detach().clone() for p in training.model.parameters()]
            for tensor in expected:
                dist.broadcast(tensor, src=0, group=marshal.group)
        differs = any(
            not torch.allclose(p, q, rtol=1e-4, atol=1e-6)
            for p, q in zip(training.model.parameters(), expected, strict=True)
        )
        verdicts[training.contender.name] = not any(marshal.agree(float(differs)))
    return verdicts
