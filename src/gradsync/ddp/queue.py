"""The buckets of a reducer in their order: launched one after the other, and settled likewise.

All ranks launch the same buckets in the same order, whatever order their gradients come in: that is
what keeps their collectives together. The queue knows nothing of phases and of backwards; when to
launch and when to settle is for the reducer to say.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from gradsync.ddp.autograd import NoGrad
from gradsync.ddp.bucket import Bucket, Packing, Slot
from gradsync.ddp.clock import StepClock
from gradsync.ddp.collectives import LocalWork, is_foreign, shares_memory, wait
from gradsync.ddp.comm_hook import CommHook, SumAfterAll
from gradsync.ddp.layout import ReducerOptions
from gradsync.ddp.route import Summation
from gradsync.ddp.special_buckets import SoloBucket


class BucketQueue:
    """Packs buckets, has them reduced, and writes them back.

    ``reduction`` sums a bucket; ``on_reduced``, if there is one, gets the slots of each as soon as
    it is reduced. ``fill_tail`` writes what this rank reports behind the last bucket, times what
    it will be divided by.
    """

    def __init__(self, options: ReducerOptions, fill_tail: Callable[[Tensor, int], None]) -> None:
        self.options = options
        self.packing = Packing(as_views=options.as_views, dtype=options.reduce_dtype)
        self.clock = StepClock()
        self.buckets: list[Bucket] = []
        self.on_reduced: Callable[[Sequence[Slot]], None] | None = None
        self.step = 0  # reductions begun
        self.group: dist.ProcessGroup
        self.reduction: Summation | CommHook
        self.alone = True  # nobody to send anything to
        self._fill_tail = fill_tail
        self._next = 0  # to launch
        self._settled = 0  # the first that is not
        self._unseen: list[SoloBucket] = []  # nothing is packed yet, see [Note: lending]

    def set_group(self, group: dist.ProcessGroup, hook: CommHook | None, *, alone: bool) -> None:
        """Reduce over ``group``, by ``hook`` if there is one; ``alone`` if nothing is to reduce."""
        self.group = group
        self.reduction = hook or Summation(group)
        # A hook may do anything with its buffer, such as resize it: shared memory cannot be.
        self.packing.memory = (
            group.symmetric_empty if hook is None and shares_memory(group) else None
        )
        self.packing.by_shape = hook is None
        self.alone = alone or (group.size() == 1 and not is_foreign(group) and hook is None)
        self.set_divisor(group.size())

    def set_divisor(self, ranks: float) -> None:
        """What the gradients of the next step are divided by, unless a hook does it."""
        averages = self.options.mean and self._sums
        self.packing.scale = 1.0 / ranks if averages else 1.0
        self.packing.fused = (
            averages and self.packing.memory is not None and ranks == self.group.size()
        )

    def install(self, buckets: list[Bucket]) -> None:
        """Take other buckets, between two steps."""
        self.buckets = buckets
        self.arm()

    def arm(self) -> None:
        """Wait for the gradients of a new step."""
        self.packing.lent.clear()
        self.packing.kept.clear()
        self._next = self._settled = 0
        for bucket in self.buckets:
            bucket.arm()
        self._unseen = [
            bucket
            for bucket in self.buckets
            if isinstance(bucket, SoloBucket) and bucket.slots[0].lendable is None
        ]

    def allocate(self) -> None:
        """Make the buffers that are surely needed."""
        if self._packs:
            for bucket in self.buckets:
                if not isinstance(bucket, SoloBucket):
                    bucket.allocate()

    @property
    def _packs(self) -> bool:
        """Do gradients have to be in buckets at all?"""
        return not self.alone or self.options.as_views

    @property
    def _sums(self) -> bool:
        """Is it no hook that reduces?"""
        return isinstance(self.reduction, Summation)

    @property
    def all_launched(self) -> bool:
        """Is every bucket on its way?"""
        return self._next == len(self.buckets)

    @property
    def has_reported(self) -> bool:
        """Has all left that the other ranks wait for, the report of the step included?"""
        return (
            not self.alone
            and self.all_launched
            and not isinstance(self.buckets[-1].work, SumAfterAll)
        )

    @property
    def all_full(self) -> bool:
        """Are all gradients that are waited for there?"""
        return not any(bucket.pending for bucket in self.buckets)

    @property
    def tail(self) -> Tensor:
        """What the ranks report, behind the last bucket."""  # 1D
        return self.buckets[-1].tail

    # ---------------------------------------------------------------- launch

    def pack_large(self, slot: Slot) -> None:
        """A large gradient is there: it does not wait for its bucket."""
        if self._packs and not self._unseen:
            with NoGrad():
                slot.bucket.pack_large(slot)

    def launch_full(self) -> None:
        """Launch the buckets that are full, up to the first that is not."""
        if self._unseen:
            return
        buckets = self.buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            self._launch(buckets[self._next])
        if self.on_reduced is not None:
            self._settle_early()

    def launch_rest(self) -> None:
        """At the end of a backward: launch what is left, with what is there."""
        for solo in self._unseen:
            solo.look()
        for bucket in self.buckets[self._next :]:
            # A hook gets every bucket: it may count on the last one.
            if not self.options.skip_unused or bucket.reached or not self._sums:
                self._launch(bucket)
                continue
            bucket.skip()
            if bucket.extra and not self.alone:
                self._send(bucket)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if self._packs:
            with NoGrad():  # under create_graph=True gradients have a graph
                bucket.pack()
        if not self.alone:
            self._send(bucket)
        self._next += 1

    def _send(self, bucket: Bucket) -> None:
        if bucket.extra:
            divisor = self.group.size() if self.reduction.divides(bucket) else 1
            self._fill_tail(bucket.tail, divisor)
        self.clock.launch()
        bucket.work = self.reduction.start(bucket)

    # ---------------------------------------------------------------- settle

    def settle_rest(self) -> None:
        """Wait for all buckets and write them back."""
        for bucket in self.buckets[self._settled :]:
            self._settle(bucket)
        self.reduction.done()

    def _settle_early(self) -> None:
        """Finish the buckets that are reduced already, while the backward goes on."""
        with NoGrad():
            while self._settled < self._next:
                bucket = self.buckets[self._settled]
                if bucket.work is not None and not bucket.work.is_completed():
                    return
                self._settle(bucket)

    def _settle(self, bucket: Bucket) -> None:
        self._settled += 1
        if bucket.work is not None:
            self._wait(bucket)
            if not bucket.skipped:
                bucket.unpack()
        if self.on_reduced is not None:
            self.on_reduced([slot for slot in bucket.slots if slot not in bucket.missing])

    def settle_missing(self) -> None:
        """Gradients that only other ranks had are set now."""
        if self.on_reduced is not None:
            self.on_reduced([slot for bucket in self.buckets for slot in bucket.missing])

    def send_zeros(self) -> list[Bucket]:
        """The other ranks wait for the buckets that we have not sent: send nothing but zeros."""
        if self.alone:
            return []
        zeroed = self.buckets[self._next :]
        for bucket in zeroed:
            bucket.zero()
            self._send(bucket)
            self._next += 1
        for bucket in self.buckets[self._settled :]:
            if isinstance(bucket.work, SumAfterAll):  # not begun, and there is more to report now
                self._send(bucket)
            try:
                self._wait(bucket)
            except Exception as error:
                # A hook may have raised for this bucket too: the others wait all the same.
                if not isinstance(bucket.work, LocalWork) or error is not bucket.work.error:
                    raise
        self.reduction.done()
        return zeroed

    def settle_given_up(self, zeroed: Sequence[Bucket], used: Sequence[bool]) -> None:
        """Use what a step that was given up has reduced, if the other ranks have used it.

        ``on_reduced`` gets a bucket before anybody can say that the step is void. Replicas stay
        equal only if this rank does the same.
        """
        if self.on_reduced is None:
            return
        for at, bucket in enumerate(self.buckets):
            late = bucket.slots if bucket in zeroed else bucket.missing
            if at >= self._settled and bucket not in zeroed:
                bucket.unpack()
                self.on_reduced([slot for slot in bucket.slots if slot not in late])
            late = [slot for slot in late if used[slot.index] and not slot.frozen]
            for slot in late:
                bucket.give(slot)
            self.on_reduced(late)

    def _wait(self, bucket: Bucket) -> None:
        wait(bucket.work, self.group, partial(self._describe, bucket), by_future=True)

    def _describe(self, bucket: Bucket) -> str:
        return (
            f"step {self.step}: the reduction of bucket {bucket.index} of {len(self.buckets)} "
            f"({bucket.describe()})"
        )

    @property
    def reduced(self) -> int:
        """How many buckets of gradients this step has reduced."""
        return sum(
            bucket.work is not None and not bucket.skipped and bool(bucket.slots)
            for bucket in self.buckets
        )
