"""Blocks whose arithmetic is torch's: for any device and dtype."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.hooks.blocks import Blocks, Layout, Stretch

_LARGEST = 127


class TorchBlocks(Blocks):
    """See `Blocks`; ``residual`` has the dtype to calculate in."""

    def __init__(self, layout: Layout, residual: Tensor) -> None:
        super().__init__(layout, residual)
        self._block = layout.block
        self._shares = residual.chunk(layout.shares)
        self._rows = _rows(layout.joined())

    def fill(self, buffer: Tensor, message: Tensor) -> None:
        """See `Blocks.fill`."""
        for gradients, values in self._both(buffer, self.residual):
            values.add_(gradients)
        for values, parcel in zip(self._shares, self._parcels(message), strict=True):
            parcel.fill(values)

    def mean(self, messages: Sequence[Tensor], buffer: Tensor) -> None:
        """See `Blocks.mean`."""
        mean = torch.empty_like(self.residual)
        senders = [self._parcels(message) for message in messages]
        for share, parcels in zip(
            mean.chunk(len(self._shares)), zip(*senders, strict=True), strict=True
        ):
            _mean(parcels, share)
        for gradients, values in self._both(buffer, mean):
            gradients.copy_(values)

    def requantise(self, parts: Sequence[Tensor], share: int, answer: Tensor) -> None:
        """See `Blocks.requantise`."""
        mean = torch.empty_like(self._shares[share])
        _mean([self._parcel(part) for part in parts], mean)
        self._parcel(answer).fill(mean)
        self._shares[share].add_(mean, alpha=len(parts))

    def _both(self, buffer: Tensor, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return (rows.both(buffer, blocks) for rows in self._rows)

    def _parcels(self, message: Tensor) -> list["Parcel"]:
        return [self._parcel(part) for part in message.chunk(len(self._shares))]

    def _parcel(self, part: Tensor) -> "Parcel":
        return Parcel(part, self._block, self.residual.dtype)


@dataclass(frozen=True)
class _Rows:
    """Stretches of one size at equal distances, in the buffer and among the blocks."""

    first: Stretch
    count: int
    distance: int
    distance_at: int

    def both(self, buffer: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The elements in the buffer, and those among the blocks."""
        shape = (self.count, self.first.size)
        start, at = buffer.storage_offset() + self.first.start, self.first.at
        return (
            buffer.as_strided(shape, (self.distance, 1), start),
            blocks.as_strided(shape, (self.distance_at, 1), blocks.storage_offset() + at),
        )


def _rows(stretches: Sequence[Stretch]) -> list[_Rows]:
    """A model that repeats its layers has few of them, whatever the number of layers."""
    rows: list[_Rows] = []
    for each in stretches:
        if rows and rows[-1].first.size == each.size:
            last = rows[-1]
            distance = each.start - last.first.start - (last.count - 1) * last.distance
            distance_at = each.at - last.first.at - (last.count - 1) * last.distance_at
            if last.count == 1 or (distance, distance_at) == (last.distance, last.distance_at):
                rows[-1] = _Rows(last.first, last.count + 1, distance, distance_at)
                continue
        rows.append(_Rows(each, 1, each.size, each.size))
    return rows


class Parcel:
    """The scales, then the integers, of some blocks, in one tensor of bytes."""

    def __init__(self, content: Tensor, block: int, dtype: torch.dtype) -> None:
        count = content.numel() // (block + dtype.itemsize)
        size = count * dtype.itemsize
        self.scales = content[:size].view(dtype).view(count, 1)
        self.integers = content[size:].view(torch.int8).view(count, block)

    def fill(self, values: Tensor) -> None:
        """Quantise ``values``, and leave in them what that has lost."""
        blocks = values.view(self.integers.shape)
        _quantise(blocks, self.scales, self.integers)
        # What is infinite or undefined is sent as such, and must not stay so for ever.
        if not torch.isfinite(self.scales.sum()):
            blocks[~torch.isfinite(self.scales.view(-1))] = 0


def _quantise(blocks: Tensor, scales: Tensor, integers: Tensor) -> None:
    scratch = blocks.abs()
    torch.amax(scratch, 1, keepdim=True, out=scales)
    # A scale is never 0, nor so small that its reciprocal is infinite.
    scales.div_(_LARGEST).clamp_(min=torch.finfo(scales.dtype).tiny)
    torch.mul(blocks, scales.reciprocal(), out=scratch)
    integers.copy_(scratch.round_())
    blocks.addcmul_(scratch, scales, value=-1)


def _mean(parcels: Sequence[Parcel], out: Tensor) -> None:
    """The mean of what the parcels hold, added in the order of the ranks."""
    total = out.view(parcels[0].integers.shape)
    total.copy_(parcels[0].integers).mul_(parcels[0].scales / len(parcels))
    for parcel in parcels[1:]:
        total.addcmul_(parcel.integers.to(out.dtype), parcel.scales / len(parcels))
