"""Gradients in blocks that are quantised to int8: where they lie, and what is done with them.

[Note: messages]
The blocks are divided into equal shares. For each share a message holds the scales of its blocks,
in the dtype of the residual, and then their integers. So a share of a message is a smaller
message, which can go to a rank of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Stretch(NamedTuple):
    """Elements that are neighbours both in the buffer and among the blocks."""

    start: int  # in the buffer
    at: int  # among the blocks
    size: int


@dataclass(frozen=True)
class Layout:
    """Where the gradients of one bucket lie among the blocks."""

    stretches: list[Stretch]  # one for each parameter
    length: int  # elements, whole blocks in whole shares
    block: int
    shares: int

    @staticmethod
    def of(places: Iterable[tuple[int, int]], block: int, shares: int) -> "Layout":
        """For parameters with these starts and sizes: each starts a block.

        >>> Layout.of([(0, 20), (20, 3)], block=8, shares=1).stretches
        [Stretch(start=0, at=0, size=20), Stretch(start=20, at=24, size=3)]
        """
        stretches, end = [], 0
        for start, size in places:
            stretches.append(Stretch(start, end, size))
            end += -(-size // block) * block
        unit = shares * block
        return Layout(stretches, -(-end // unit) * unit, block, shares)

    @property
    def end(self) -> int:
        """Where in the buffer the gradients end."""
        return max((start + size for start, _, size in self.stretches), default=0)

    def joined(self) -> list[Stretch]:
        """Fewer stretches: those that go on in the next are one with it."""
        joined: list[Stretch] = []
        for each in self.stretches:
            last = joined[-1] if joined else each
            if each.start - last.start == each.at - last.at == last.size and joined:
                joined[-1] = Stretch(last.start, last.at, last.size + each.size)
            else:
                joined.append(each)
        return joined

    def message_size(self, dtype: torch.dtype) -> int:
        """The bytes of a message whose scales are of ``dtype``."""
        return self.length // self.block * (self.block + dtype.itemsize)


class Blocks(ABC):
    """The blocks of one bucket, and what earlier steps have left in them, the residual.

    Parts and messages are flat tensors of bytes, see [Note: messages].
    """

    def __init__(self, layout: Layout, residual: Tensor) -> None:
        self.residual = residual
        self.end = layout.end
        self.message_size = layout.message_size(residual.dtype)

    @abstractmethod
    def fill(self, buffer: Tensor, message: Tensor) -> None:
        """Add the gradients to the residual, quantise that, and leave what it has lost.

        A block that is infinite or undefined gets a scale that is so too, and leaves nothing.
        """

    @abstractmethod
    def mean(self, messages: Sequence[Tensor], buffer: Tensor) -> None:
        """Make the mean of the messages, added in their order, the gradients."""

    @abstractmethod
    def requantise(self, parts: Sequence[Tensor], share: int, answer: Tensor) -> None:
        """Quantise the mean of ``parts``, which are of one share, into ``answer``.

        What this loses is added to the share's residual, times the number of parts.
        """
