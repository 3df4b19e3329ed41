"""Which collective sums a small model's gradients faster, found by trying both.

[Note: two routes] On gloo an all-reduce of a few kB takes two to three times as long as an
all-gather followed by a local sum, since its ring has more hand-overs between threads; for large
buckets it is the other way round. With two ranks both give the same bits, as addition commutes,
so the choice may depend on a measurement. With more they may not, and the all-reduce stays.
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.ddp.bucket import Bucket
from gradsync.ddp.collectives import Work, all_reduce, broadcast, is_foreign, wait

SMALL_BYTES = 256 * 1024
WARM_UP_STEPS = 10
TRIALS = 8  # of each route


class GatherSum:
    """An all-gather under way, which ends as a sum in ``tensor``: a work like others."""

    def __init__(self, group: dist.ProcessGroup, tensor: Tensor) -> None:
        self._tensor = tensor
        self._parts = [torch.empty_like(tensor) for _ in range(group.size())]
        self._work: Work = group.allgather([self._parts], [tensor])

    def wait(self) -> None:
        """Wait for the parts and add them up."""
        self._work.wait()
        torch.add(*self._parts, out=self._tensor)


class Router:
    """Starts the sum of a model's only bucket by the route that is faster here."""

    @staticmethod
    def suits(group: dist.ProcessGroup, buckets: Sequence[Bucket]) -> bool:
        """Is there a choice to make?"""
        return (
            len(buckets) == 1
            and buckets[0].nbytes <= SMALL_BYTES
            and buckets[0].device.type == "cpu"
            and not buckets[0].dtype.is_complex
            and group.size() == 2
            and not is_foreign(group)
            and group.name() == "gloo"
        )

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._steps = 0
        self._began = 0.0
        self._gathers = False
        self._decided = False
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def start(self, payload: Tensor) -> Work:
        """Begin the sum."""
        if not self._decided:
            self._steps += 1
            self._gathers = self._steps > WARM_UP_STEPS and self._steps % 2 == 0
            self._began = time.perf_counter()
        return (
            GatherSum(self._group, payload) if self._gathers else all_reduce(self._group, payload)
        )

    def done(self) -> None:
        """The sum is there."""
        if self._decided or self._steps <= WARM_UP_STEPS:
            return
        self._seconds[self._gathers].append(time.perf_counter() - self._began)
        if self._steps >= WARM_UP_STEPS + 2 * TRIALS:
            self._decide()

    def _decide(self) -> None:
        """Take rank 0's word for it, since all ranks have to go the same way."""
        faster = median(self._seconds[True]) < median(self._seconds[False])
        choice = torch.tensor([int(faster)])
        wait(broadcast(self._group, choice, 0), self._group, lambda: "the choice of a route")
        self._gathers = bool(choice.item())
        self._decided = True
