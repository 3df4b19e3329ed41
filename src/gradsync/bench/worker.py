"""What the ranks do: a heat is one workload on one number of ranks, for all contenders.

[Note: a heat]
Each rank trains a throw-away model once (libraries initialise). Then every contender builds its
model, with the same weights, and warms up. Then come the rounds. In a round each contender has one
turn: one step that is not timed (its weights come back into the caches), a barrier, and its
timed steps. The order changes from round to round. After each turn rank 0 reports what all ranks
measured, so nothing is lost when a later turn fails. At last some steps are taken apart, for the
timeline; they are not in the measurements.

[Note: equal work]
A contender that skips work must not win by it. After warm-up every contender's weights must have
moved where those of the first one under DDP have. This is not asked of hooks that compress, or
of 16-bit types.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

from gradsync.bench.contenders import DTYPES, Contender, Training, make_batches
from gradsync.bench.meeting import Meeting, turns
from gradsync.bench.memory import PeakMemory
from gradsync.bench.workloads import load

WATCHED_STEPS: Final = 5
DISTANCE: Final = 0.05  # of the weights' way so far, within which two count as equal

Emit = Callable[[dict[str, Any]], None]  # on rank 0: an event for whoever displays and saves


@dataclass(frozen=True, kw_only=True)
class Heat:
    """The settings of a heat; ``runner.py`` makes them."""

    workload: str  # a name, or FILE:Class
    world: int
    contenders: tuple[Contender, ...]
    batch_size: int | None = None  # None: the workload's own
    bucket_cap_mb: float | None = None
    comm_hook: str | None = None
    dtype: str = "float32"
    steps_by_round: tuple[int, ...] = (5,) * 10
    warm_up: int = 5
    seed: int = 0
    threads: int = 1

    @property
    def backends(self) -> tuple[str, ...]:
        """Those of the contenders, each once."""
        return tuple(dict.fromkeys(each.backend for each in self.contenders if each.backend))


def run_heat(heat: Heat, meeting: Meeting, device: torch.device, emit: Emit) -> None:
    """Run it, on one of its ranks. Events go to ``emit`` on rank 0, see runner.py."""
    torch.set_num_threads(heat.threads)
    emit = emit if meeting.rank == 0 else _ignore
    dtype = DTYPES[heat.dtype]
    benchmark = load(
        heat.workload,
        device=device,
        backend=next(iter(heat.backends), "gloo"),
        bucket_size=heat.bucket_cap_mb,
        batch_size=heat.batch_size,
    )
    batches = make_batches(benchmark, dtype, seed=1000 * (heat.seed + 1) + meeting.rank)
    train = partial(Training, benchmark, batches=batches, dtype=dtype, seed=heat.seed)

    emit({"event": "warming up"})
    first = train(lambda model: model)
    origin = [parameter.detach().clone() for parameter in first.model.parameters()]
    parameters = sum(parameter.numel() for parameter in origin)
    first.run(1)
    del first
    emit({"event": "ready", "batch_size": benchmark.batch_size, "parameters": parameters})

    trainings: list[Training] = []
    for index, contender in enumerate(heat.contenders):
        emit({"event": "building", "contender": index})
        group = meeting.groups[contender.backend] if contender.backend else None
        meeting.barrier()
        peak = PeakMemory(device)
        wrap = partial(
            contender.wrap, group=group, bucket_cap_mb=heat.bucket_cap_mb, comm_hook=heat.comm_hook
        )
        trainings.append(train(wrap))
        trainings[-1].run(heat.warm_up)
        emit({"event": "built", "contender": index, "peak_memory": meeting.gather(peak.growth())})
    for index in _astray(heat, trainings, origin, meeting):
        emit({"event": "astray", "contender": index})
    del origin

    for number, steps in enumerate(heat.steps_by_round):
        gc.collect()
        for index in turns(range(len(trainings)), number):
            emit({"event": "turn", "contender": index, "round": number})
            gc.collect(1)  # what the last one left; all of it would take 0.1 s each time
            trainings[index].run(1)
            meeting.barrier()
            seconds = meeting.gather(trainings[index].run(steps))
            emit({"event": "measured", "contender": index, "round": number, "seconds": seconds})

    for index, training in enumerate(trainings):
        meeting.barrier()
        training.watch(meeting.rank, 1)
        timeline = training.watch(meeting.rank, WATCHED_STEPS)
        timelines = meeting.gather(None if timeline is None else asdict(timeline))
        emit({"event": "watched", "contender": index, "timelines": timelines})


def _astray(
    heat: Heat, trainings: Sequence[Training], origin: Sequence[torch.Tensor], meeting: Meeting
) -> list[int]:
    """The contenders whose weights are not those of the first one under DDP, on any rank."""
    synced = [index for index, each in enumerate(heat.contenders) if each.backend is not None]
    if heat.comm_hook or heat.dtype not in ("float32", "float64") or len(synced) < 2:
        return []
    expected = list(trainings[synced[0]].model.parameters())
    way = _distance(expected, origin)
    found = [
        _distance(trainings[index].model.parameters(), expected) > DISTANCE * way
        for index in synced
    ]
    return [
        index
        for index, *verdicts in zip(synced, *meeting.gather(found), strict=True)
        if any(verdicts)
    ]


def _distance(some: Any, others: Any) -> float:
    squares = ((p.detach() - q.detach()).double().square().sum() for p, q in zip(some, others))  # noqa: B905
    return float(sum(squares, torch.zeros(())).sqrt())


def _ignore(event: dict[str, Any]) -> None:
    pass
