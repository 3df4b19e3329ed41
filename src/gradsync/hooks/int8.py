"""Gradients travel as 8-bit integers with one scale a block; what is lost comes with the next step.

[Note: two quantisations]
Two ranks send each other everything, and each dequantises both parts. With more ranks that
would grow with their number, so there each rank gets a share of every rank's integers, averages
them, and sends the mean to all, quantised again. The error of that second quantisation is known
to one rank only, which adds it to its own residual, times the number of ranks: so the next mean
makes up for it, and there is no second set of residuals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsync.errors import ArgumentError
from gradsync.hooks import wire
from gradsync.hooks.base import Hook, Round, Rounds, compute_dtype
from gradsync.hooks.memory import Owner, ParameterMemory, PerBucket, places_of

_LARGEST = 127
# Elements that are quantised at a time, so that intermediate results stay in the cache:
# 6.5 million take 8 ms this way and 16 ms at once.
_CHUNK = 1 << 18


class Int8(Hook):
    """Send gradients as int8 with a scale for each ``block`` of elements: a quarter of float32.

    The largest element of a block becomes ±127. What rounding takes away is remembered and
    added to the next gradient (error feedback), so over the steps nothing is lost. A block with
    an infinite or undefined element arrives as such, and is not remembered.

    >>> import gradsync, torch
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 4))
    >>> hook = gradsync.hooks.Int8(block=64)
    >>> ddp.register_comm_hook(None, hook)
    >>> ddp(torch.ones(1, 4)).sum().backward()
    """

    name = "int8"

    def __init__(self, block: int = 256, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        if not 8 <= block <= _CHUNK or block % 8:
            raise ArgumentError(
                f"block must be a multiple of 8, at least 8 and at most {_CHUNK}, not {block}"
            )
        self.block = block
        self._plans: PerBucket[_Plan] = PerBucket()
        self._residuals = ParameterMemory()

    def __repr__(self) -> str:
        return f"Int8(block={self.block})"

    def reduce(self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup) -> Rounds:
        """See `Hook.reduce`."""
        world = group.size()
        shares = 1 if world == 2 else world
        plan = self._plans.get(bucket, lambda _: self._plan(bucket, buffer, shares))
        plan.add(buffer)
        residual = plan.residual.chunk(shares)
        outgoing = [Parcel(share, self.block) for share in residual]
        for parcel, share in zip(outgoing, residual, strict=True):
            parcel.fill(share)
        if shares == 1:
            parts, work = wire.share(group, outgoing[0].bytes)
            yield Round(work, last=True)
            sums = [[Parcel(plan.residual, self.block, part) for part in parts]]
        else:
            parts, work = wire.deal(group, torch.cat([parcel.bytes for parcel in outgoing]))
            yield Round(work, last=False)
            mine = residual[group.rank()]
            mean = torch.empty_like(mine)
            _mean([Parcel(mine, self.block, part) for part in parts], mean)
            parcel = Parcel(mean, self.block)
            parcel.fill(mean)
            mine.add_(mean, alpha=world)
            parts, work = wire.share(group, parcel.bytes)
            yield Round(work, last=True)
            sums = [[Parcel(mine, self.block, part)] for part in parts]
        plan.put(sums, buffer)

    def state_dict(self) -> dict[str, Any]:
        """See `Hook.state_dict`.

        >>> import gradsync
        >>> gradsync.hooks.Int8().state_dict()
        {'hook': 'int8', 'block': 256, 'residuals': []}
        """
        return super().state_dict() | {
            "block": self.block,
            "residuals": self._residuals.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Hook.load_state_dict`.

        >>> import gradsync
        >>> gradsync.hooks.Int8().load_state_dict(gradsync.hooks.Int8().state_dict())
        """
        super().load_state_dict(state)
        self._residuals.load(state["residuals"])

    def _plan(self, bucket: GradBucket, buffer: Tensor, shares: int) -> "_Plan":
        """Each parameter starts a block, see [Note: whose numbers]."""
        owners, stretches, end = [], [], 0
        for parameter, start, size in places_of(bucket):
            owners.append(Owner(parameter, end, size))
            stretches.append(_Stretch(start, end, size))
            end += -(-size // self.block) * self.block
        unit = shares * self.block
        residual = self._residuals.lay_out(
            owners, -(-end // unit) * unit, compute_dtype(buffer.dtype), buffer.device
        )
        return _Plan(residual, _join(stretches))


@dataclass(frozen=True)
class _Stretch:
    """Elements that are neighbours both in the buffer and among the blocks."""

    start: int  # in the buffer
    blocks_start: int  # among the blocks
    size: int


def _join(stretches: Sequence[_Stretch]) -> list[_Stretch]:
    joined: list[_Stretch] = []
    for each in stretches:
        if joined and (
            each.start - joined[-1].start
            == each.blocks_start - joined[-1].blocks_start
            == joined[-1].size
        ):
            last = joined.pop()
            each = _Stretch(last.start, last.blocks_start, last.size + each.size)
        joined.append(each)
    return joined


@dataclass(frozen=True)
class _Plan:
    """Where the gradients of one bucket lie among the blocks."""

    residual: Tensor  # 1D, whole blocks
    stretches: list[_Stretch]

    def add(self, buffer: Tensor) -> None:
        """Add the gradients to what earlier steps have left."""
        residual, gradients = self._sides(self.residual, buffer)
        torch._foreach_add_(residual, gradients)

    def put(self, sums: Sequence[Sequence["Parcel"]], buffer: Tensor) -> None:
        """Make ``buffer`` the mean of the parcels, of which there is a list for each share."""
        if len(self.stretches) == 1 and len(sums) == 1:
            _mean(sums[0], buffer)
            return
        blocks = torch.empty_like(self.residual)
        for parcels, share in zip(sums, blocks.chunk(len(sums)), strict=True):
            _mean(parcels, share)
        means, gradients = self._sides(blocks, buffer)
        torch._foreach_copy_(gradients, means)

    def _sides(self, blocks: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return (
            [blocks[s.blocks_start : s.blocks_start + s.size] for s in self.stretches],
            [buffer[s.start : s.start + s.size] for s in self.stretches],
        )


class Parcel:
    """The scales, then the integers, of ``like``'s elements, in one tensor of bytes."""

    def __init__(self, like: Tensor, block: int, content: Tensor | None = None) -> None:
        count = like.numel() // block
        size = count * like.element_size()
        if content is None:
            content = torch.empty(size + like.numel(), dtype=torch.uint8, device=like.device)
        self.bytes = content
        self.scales = content[:size].view(like.dtype).view(count, 1)
        self.integers = content[size:].view(torch.int8).view(count, block)

    def fill(self, values: Tensor) -> None:
        """Quantise ``values``, and leave in them what that has lost."""
        blocks = values.view(self.integers.shape)
        for first, last in _chunks(self.integers):
            _quantise(blocks[first:last], self.scales[first:last], self.integers[first:last])
        if not torch.isfinite(self.scales.sum()):
            # Their blocks arrive undefined, and must not stay so for ever.
            blocks[~torch.isfinite(self.scales.view(-1))] = 0


def quantise(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """``values`` (1D, whole blocks) as int8, and the scale of each block.

    >>> integers, scales = quantise(torch.tensor([0.0, 1.0, -2.0, 127.0]), block=2)
    >>> integers.tolist()
    [[0, 127], [-2, 127]]
    """
    parcel = Parcel(values, block)
    parcel.fill(values.clone())
    return parcel.integers, parcel.scales


def dequantise(integers: Tensor, scales: Tensor) -> Tensor:
    """The values that `quantise` stood for, 1D.

    >>> dequantise(*quantise(torch.tensor([0.0, 1.0, -2.0, 127.0]), block=2)).tolist()
    [0.0, 1.0, -2.0, 127.0]
    """
    return (integers * scales).view(-1)


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
    scales = [parcel.scales / len(parcels) for parcel in parcels]
    block = parcels[0].integers.shape[1]
    for first, last in _chunks(parcels[0].integers):
        total = parcels[0].integers[first:last] * scales[0][first:last]
        for parcel, scale in zip(parcels[1:], scales[1:], strict=True):
            values = parcel.integers[first:last].to(total.dtype)
            total.addcmul_(values, scale[first:last])
        place = out[first * block : last * block]
        place.copy_(total.view(-1)[: place.numel()])


def _chunks(integers: Tensor) -> Iterator[tuple[int, int]]:
    """Blocks, from one to before another, that are worked on together."""
    count, block = integers.shape
    step = max(1, _CHUNK // block)
    for first in range(0, count, step):
        yield first, min(first + step, count)
