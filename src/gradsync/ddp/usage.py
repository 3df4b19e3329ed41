"""Which parameters a step used, and what becomes of the gradients of those it did not.

A parameter that no rank used keeps its ``.grad`` as it was; one that only others used gets the
average. A ``.grad`` left over from an earlier step is sent along, as torch does, since this rank
cannot know what the others will do with the parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradsync.ddp.bucket import Bucket, Slot
from gradsync.ddp.distributed_autograd import Home


@dataclass
class Unreached:
    """The slots that a backward has not reached on this rank."""

    unused: list[Slot] = field(default_factory=list)
    frozen: list[Slot] = field(default_factory=list)  # requires_grad was switched off
    stale: list[tuple[Slot, Tensor]] = field(default_factory=list)  # with the .grad they had


def find_unreached(slots: Sequence[Slot], home: Home) -> Unreached:
    """Sort out the slots whose gradients are not all there at the end of a backward."""
    found = Unreached()
    for slot, gradient in zip(slots, home.of(slots), strict=True):
        if slot.fires >= slot.due > 0:
            continue
        if not slot.param.requires_grad:
            found.frozen.append(slot)
            continue
        if slot.fires < slot.due and not slot.used_unsynced:
            found.unused.append(slot)
        if gradient is not None and not slot.fires and not slot.used_unsynced:
            found.stale.append((slot, gradient.detach().clone()))
    return found


def used_here(slots: Sequence[Slot], buckets: Sequence[Bucket]) -> list[bool]:
    """For each parameter, whether this rank has a gradient that is not reduced yet."""
    used = [slot.fires > 0 or slot.used_unsynced for slot in slots]
    for bucket in buckets:
        for slot in bucket.missing:
            used[slot.index] = False
    return used


def settle_unused(
    buckets: Sequence[Bucket],
    stale: Sequence[tuple[Slot, Tensor]],
    used_anywhere: Sequence[bool],
    home: Home,
) -> None:
    """After the reduction: set the gradients that only others had, restore what nobody used."""
    for bucket in buckets:
        for slot in bucket.missing:
            if used_anywhere[slot.index]:
                bucket.give(slot)
    now = home.of([slot for slot, _ in stale])
    for (slot, saved), gradient in zip(stale, now, strict=True):
        if not used_anywhere[slot.index] and gradient is not None:
            gradient.copy_(saved)
