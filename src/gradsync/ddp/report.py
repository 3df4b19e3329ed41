"""What this rank has to say of a step, and what it hears from the others."""

import weakref
from collections.abc import Sequence

from torch import Tensor

from gradsync.ddp.bucket import Slot
from gradsync.ddp.layout import ReducerOptions
from gradsync.ddp.queue import BucketQueue
from gradsync.ddp.rollcall import (
    Incident,
    RollCall,
    Statement,
    has_incident,
    usage_counts,
    write_trailer,
)
from gradsync.ddp.usage import Unreached, used_here

NOTHING = Incident(0)


class StepReport:
    """The report of the step under way; it travels in the tail of the last bucket of ``queue``."""

    def __init__(self, slots: Sequence[Slot], options: ReducerOptions) -> None:
        self._slots = slots
        self.queue = BucketQueue(options, self._fill_tail)
        self.forwards = 0  # since the last reduction
        self._zero: weakref.ref[Tensor] | None = None  # a tail that the last step has left at 0
        self.clear()

    def clear(self) -> None:
        """A new step begins."""
        self.incidents = NOTHING
        self.unreached = Unreached()
        self.forwards = 0
        self.heard = False  # what the ranks have said of this step

    def used_here(self) -> list[bool]:
        """For each parameter, whether this rank has a gradient that is not reduced yet."""
        return used_here(self._slots, self.queue.buckets)

    def _fill_tail(self, tail: Tensor, divisor: int) -> None:
        is_zero, self._zero = self._zero is not None and self._zero() is tail, None
        if is_zero and not self.incidents:
            return
        used = self.used_here() if tail.numel() > 1 else None
        write_trailer(tail, incident=bool(self.incidents), used=used)
        if divisor != 1:  # what the ranks report is added up, and not averaged
            tail.mul_(divisor)

    def hear(self) -> list[Statement]:
        """What the ranks say, if any of them has something to report."""
        self.heard = True
        if self.queue.alone:
            return [self._statement()] if self.incidents else []
        tail = self.queue.tail
        if has_incident(tail):
            return self.call_roll()
        if tail.numel() == 1:
            self._zero = weakref.ref(tail)
        return []

    def call_roll(self) -> list[Statement]:
        """What all ranks say, by rank: they all have to call."""
        queue = self.queue
        device = queue.buckets[0].device
        return RollCall(queue.group, device, self._statement(), queue.step).wait()

    def _statement(self) -> Statement:
        unused = {slot.index for slot in self.unreached.unused}
        return Statement(
            self.incidents,
            self.forwards,
            self.used_here(),
            [index in unused for index in range(len(self._slots))],
        )

    def used_anywhere(
        self, statements: Sequence[Statement], known: Sequence[bool] | None
    ) -> Sequence[bool]:
        """For each parameter, whether any rank used it in this step.

        ``known`` is what a static graph uses, for steps in which nobody has said anything.
        """
        if self.queue.alone:
            return self.used_here()
        if (counts := self.usage_counts()) is not None:
            return [count > 0 for count in counts.tolist()]
        if statements:
            return [any(flags) for flags in zip(*(s.used for s in statements), strict=True)]
        return known or self.used_here()

    def usage_counts(self) -> Tensor | None:
        """How many ranks used each parameter, where that travels with the step."""
        queue = self.queue
        return None if queue.alone or queue.buckets[-1].extra <= 1 else usage_counts(queue.tail)
