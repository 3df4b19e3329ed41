"""Gradients of one shape at equal distances in a bucket: one operation works on all of them.

Models repeat their layers, and so do buckets. A step on 300 matrices of 32x32 one by one would
spend its time in calling operations.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from gradsync.hooks.memory import Owner


@dataclass(frozen=True)
class Alike:
    """The members of a group, and how to see them as one tensor."""

    members: list[Owner]
    shape: tuple[int, ...]  # of each
    distance: int

    @property
    def start(self) -> int:
        """Where the first of them begins."""
        return self.members[0].start

    def view(self, flat: Tensor) -> Tensor:
        """All of them in ``flat``, one after the other along the first dimension."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return flat.as_strided(
            (len(self.members), *self.shape),
            (self.distance, *strides),
            flat.storage_offset() + self.start,
        )


def group_alike(owners: Sequence[tuple[Owner, tuple[int, ...]]]) -> list[Alike]:
    """Groups of those that have the same shape and lie at equal distances, in their order."""
    groups: list[Alike] = []
    growing: dict[Hashable, int] = {}  # the last group of each shape
    for owner, shape in owners:
        index = growing.get(shape)
        if index is not None:
            group = groups[index]
            distance = owner.start - group.members[-1].start
            if len(group.members) == 1 or distance == group.distance:
                groups[index] = Alike([*group.members, owner], shape, distance)
                continue
        growing[shape] = len(groups)
        groups.append(Alike([owner], shape, owner.size))
    return groups
