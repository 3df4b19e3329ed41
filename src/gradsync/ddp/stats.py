"""``ddp.stats()``: what a ``DistributedDataParallel`` has to say of itself, typed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsync.ddp.clock import StepTimes

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer


@dataclass(frozen=True)
class Stats:
    """Facts about the buckets and the times of a ``DistributedDataParallel`` on this rank.

    Times are in seconds, of the last step that was reduced and as means over all of them.

    >>> import torch, gradsync
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> stats = ddp.stats()
    >>> stats.steps, stats.bucket_bytes, stats.unused
    (1, (40,), ())
    >>> stats.last.exposed <= stats.last.communication
    True
    """

    steps: int  # that were reduced
    bucket_bytes: tuple[int, ...]  # of gradients, in the order of reduction
    has_rebuilt: bool  # are the buckets in the order of the gradients?
    last: StepTimes
    mean: StepTimes
    unused: tuple[str, ...]  # parameters that got no gradient on this rank in the last step

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return len(self.bucket_bytes)

    @property
    def bytes(self) -> int:
        """The size of all gradients."""
        return sum(self.bucket_bytes)


def collect(reducer: "Reducer") -> Stats:
    """The facts as they are now."""
    return Stats(
        steps=reducer.clock.steps,
        bucket_bytes=tuple(bucket.nbytes for bucket in reducer.buckets if bucket.slots),
        has_rebuilt=reducer.has_rebuilt,
        last=reducer.clock.last,
        mean=reducer.clock.mean,
        unused=tuple(slot.name for slot in reducer.unused),
    )
