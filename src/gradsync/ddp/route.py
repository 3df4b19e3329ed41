"""Which way small buckets are summed faster by two ranks, found by trying both.

[Note: two routes] Two ranks can sum a bucket without an all-reduce: each sends the other all of
its own and adds what it gets. The bytes on the wire are the same, but gloo's ring has several
hand-overs between threads, which for a few kB take most of the time. For large buckets the ring
is faster, since it adds while it receives. Both give the same bits, as addition commutes, so
the choice may depend on a measurement.
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.backend.shared_memory import PersistentReduction
from gradsync.ddp.bucket import Bucket
from gradsync.ddp.collectives import (
    LocalWork,
    Work,
    all_reduce,
    broadcast,
    is_foreign,
    shares_memory,
    wait,
)

SMALL_BYTES = 1024 * 1024
WARM_UP_STEPS = 10
TRIALS = 12  # of each route
CLEARLY = 1.2
TAG = 0x67726164  # of our messages, far from those that programs count up from 0


class Exchange(LocalWork):
    """A bucket on its way to the other rank, and the other's to us."""

    def __init__(self, group: dist.ProcessGroup, mine: Tensor, theirs: Tensor, tag: int) -> None:
        other = 1 - group.rank()
        self._mine = mine
        self._theirs = theirs
        self._works: Sequence[Work] = (
            group.recv([theirs], other, tag),
            group.send([mine], other, tag),
        )

    def wait(self) -> None:
        """Wait for the other rank's, and add it up."""
        for work in self._works:
            work.wait()
        self._mine.add_(self._theirs)


class Summation:
    """Sums buckets over the ranks; small ones by the route that is faster here.

    The last bucket of a step is the one that is timed: nothing is left to overlap it with.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        is_gloo = not is_foreign(group) and not shares_memory(group) and group.name() == "gloo"
        self._two_ways = group.size() == 2 and is_gloo
        self._theirs: dict[int, Tensor] = {}  # by bucket
        self._steps = 0
        self._began = 0.0
        self._exchanges = False
        self._timed = False
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    @property
    def _trying(self) -> bool:
        return self._two_ways and self._steps < WARM_UP_STEPS + 2 * TRIALS

    def start(self, bucket: Bucket) -> Work:
        """Begin the sum of a bucket."""
        if bucket.is_symmetric:
            return self._start_again(bucket)
        exchanges = self._exchanges
        if not bucket.slots:  # a few numbers, for which there is nothing to find out
            exchanges = self._two_ways
        elif bucket.extra and self._trying and _is_small(bucket):
            self._count_step()
        payload = bucket.payload
        if not exchanges or not _is_small(bucket):
            return all_reduce(self.group, payload, average=bucket.is_averaged)
        theirs = self._theirs.get(bucket.index)
        if theirs is None or theirs.shape != payload.shape or theirs.dtype != payload.dtype:
            self._theirs[bucket.index] = theirs = torch.empty_like(payload)
        return Exchange(self.group, payload, theirs, TAG + bucket.index)

    def _start_again(self, bucket: Bucket) -> PersistentReduction:
        """Begin the sum of memory that is the same in every step."""
        payload = bucket.payload
        op = dist.ReduceOp.AVG if bucket.is_averaged else dist.ReduceOp.SUM
        ready = bucket.prepared
        if ready is None or ready.tensor is not payload or ready.op is not op:
            assert shares_memory(self.group), "the payload is of its memory"
            ready = bucket.prepared = self.group.persistent_all_reduce(payload, op)
        ready.start()
        return ready

    def divides(self, bucket: Bucket) -> bool:
        """Is what travels behind the gradients averaged?"""
        return bucket.is_averaged

    def _count_step(self) -> None:
        """The last bucket of a step: take the time, and choose a route for the next step."""
        self._steps += 1
        self._timed = self._exchanges
        self._began = time.perf_counter()
        self._exchanges = self._steps >= WARM_UP_STEPS and not self._exchanges

    def done(self) -> None:
        """All sums of a step are there."""
        if self._began and self._steps > WARM_UP_STEPS:
            self._seconds[self._timed].append(time.perf_counter() - self._began)
            if not self._trying:
                self._decide()
        self._began = 0.0

    def _decide(self) -> None:
        """Take rank 0's word for it, since both ranks have to go the same way."""
        # The exchange costs less CPU time everywhere it was measured, so it has to lose clearly.
        faster = median(self._seconds[True]) < CLEARLY * median(self._seconds[False])
        choice = torch.tensor([int(faster)], device="cpu")
        wait(broadcast(self.group, choice, 0), self.group, lambda: "the choice of a route")
        self._exchanges = bool(choice.item())


def _is_small(bucket: Bucket) -> bool:
    return (
        bucket.nbytes <= SMALL_BYTES
        and type(bucket) is Bucket
        and bucket.device.type == "cpu"
        and not bucket.dtype.is_complex
    )
