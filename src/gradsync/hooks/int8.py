"""Gradients travel as 8-bit integers with one scale a block; what is lost comes with the next step.

[Note: two quantisations]
Two ranks send each other everything, and each dequantises both parts. With more ranks that
would grow with their number, so there each rank gets a share of every rank's integers, averages
them, and sends the mean to all, quantised again. The error of that second quantisation is known
to one rank only, which adds it to its own residual, times the number of ranks: so the next mean
makes up for it, and there is no second set of residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsync.errors import ArgumentError
from gradsync.hooks import wire
from gradsync.hooks.base import Hook, Round, Rounds, compute_dtype
from gradsync.hooks.memory import Owner, ParameterMemory, PerBucket, Roster, places_of

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
        self._roster = Roster()
        self._plans: PerBucket[_Plan] = PerBucket(self._roster)
        self._residuals = ParameterMemory(self._roster)

    def __repr__(self) -> str:
        return f"Int8(block={self.block})"

    def reduce(self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup) -> Rounds:
        """See `Hook.reduce`."""
        world, rank = group.size(), group.rank()
        shares = 1 if world == 2 else world
        plan = self._plans.get(bucket, lambda: self._plan(bucket, buffer, shares))
        size = Parcel.size_of(plan.residual, self.block)
        message, others = (
            self.scratch(bucket, role, size, torch.uint8, buffer.device)
            for role in ("mine", "theirs")
        )
        spare = self.scratch(bucket, "spare", 2 * plan.longest, plan.residual.dtype, buffer.device)
        parcels = plan.parcels(message.chunk(shares))
        for chunk in plan.chunks:
            chunk.add(buffer, plan.residual)
            parcels[chunk.share].fill(plan.residual, chunk)
        for parcel in parcels:
            parcel.clear_undefined(plan.residual)
        if shares == 1:
            parts, work = wire.share(group, message, others)
            yield Round(work, last=True)
            senders = [plan.parcels([part]) for part in parts]
        else:
            parts, work = wire.deal(group, message)
            yield Round(work, last=False)
            mine = [chunk for chunk in plan.chunks if chunk.share == rank]
            answer = Parcel(parcels[rank].bytes, self.block, parcels[rank].origin, plan.residual)
            received = [Parcel(part, self.block, answer.origin, plan.residual) for part in parts]
            mean = torch.empty_like(plan.residual)
            for chunk in mine:
                _mean(received, chunk, chunk.of(mean), spare)
                answer.fill(mean, chunk)
            answer.clear_undefined(mean)
            start, stop = answer.origin, answer.origin + answer.integers.numel()
            plan.residual[start:stop].add_(mean[start:stop], alpha=world)
            parts, work = wire.share(group, answer.bytes)
            yield Round(work, last=True)
            senders = [plan.parcels(parts)]
        for chunk in plan.chunks:
            received = [sender[chunk.share] for sender in senders]
            place = chunk.place(buffer, plan.residual.dtype)
            if place is not None:
                _mean(received, chunk, place, spare)
            else:
                mean = spare[: chunk.stop - chunk.start]
                _mean(received, chunk, mean, spare)
                chunk.put(mean, buffer)

    def end_step(self, buckets: int) -> None:
        """See `Hook.end_step`."""
        super().end_step(buckets)
        self._plans.keep_first(buckets)

    def state_dict(self) -> dict[str, Any]:
        """See `Hook.state_dict`.

        >>> import gradsync
        >>> gradsync.hooks.Int8().state_dict()
        {'hook': 'int8', 'block': 256, 'parameters': [], 'residuals': {}}
        """
        return super().state_dict() | {
            "block": self.block,
            "parameters": self._roster.state(),
            "residuals": self._residuals.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Hook.load_state_dict`.

        >>> import gradsync
        >>> gradsync.hooks.Int8().load_state_dict(gradsync.hooks.Int8().state_dict())
        """
        super().load_state_dict(state)
        self._roster.load(state["parameters"])
        self._residuals.load(state["residuals"])

    def _plan(self, bucket: GradBucket, buffer: Tensor, shares: int) -> "_Plan":
        """Each parameter starts a block, see [Note: whose numbers]."""
        owners, stretches, end = [], [], 0
        for parameter, start, size in places_of(bucket):
            owners.append(Owner(parameter, end, size))
            stretches.append(_Stretch(start, end, size))
            end += -(-size // self.block) * self.block
        unit = shares * self.block
        end = -(-end // unit) * unit
        residual = self._residuals.lay_out(owners, end, compute_dtype(buffer.dtype), buffer.device)
        return _Plan(
            residual, self.block, _chunks(_join(stretches), end // shares, shares, self.block)
        )


@dataclass(frozen=True)
class _Stretch:
    """Elements that are neighbours both in the buffer and among the blocks."""

    start: int  # in the buffer
    at: int  # among the blocks
    size: int


@dataclass(frozen=True)
class _Rows:
    """Stretches of one size at equal distances, in the buffer and among the blocks."""

    first: _Stretch
    count: int
    distance: int
    distance_at: int

    def both(self, buffer: Tensor, blocks: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        """The elements in the buffer, and those among the blocks, of which ``shift`` are absent."""
        shape = (self.count, self.first.size)
        return (
            buffer.as_strided(
                shape, (self.distance, 1), buffer.storage_offset() + self.first.start
            ),
            blocks.as_strided(
                shape, (self.distance_at, 1), blocks.storage_offset() + self.first.at - shift
            ),
        )


@dataclass(frozen=True)
class _Chunk:
    """Blocks that are worked on together, and the gradients in them."""

    start: int  # elements among the blocks
    stop: int
    share: int
    rows: list[_Rows]

    def of(self, blocks: Tensor) -> Tensor:
        """Its part of the blocks."""
        return blocks[self.start : self.stop]

    def add(self, buffer: Tensor, residual: Tensor) -> None:
        """Add the gradients to what earlier steps have left."""
        for rows in self.rows:
            gradients, blocks = rows.both(buffer, residual, 0)
            blocks.add_(gradients)

    def place(self, buffer: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Its part of the buffer, if it is in one piece and of that dtype."""
        only = self.rows[0] if len(self.rows) == 1 else None
        size = self.stop - self.start
        if only is None or only.count * only.first.size != size or only.distance != only.first.size:
            return None
        start = only.first.start
        return buffer[start : start + size] if buffer.dtype == dtype else None

    def put(self, values: Tensor, buffer: Tensor) -> None:
        """Make ``values``, which are those of this chunk, the gradients."""
        for rows in self.rows:
            gradients, blocks = rows.both(buffer, values, self.start)
            gradients.copy_(blocks)


@dataclass(frozen=True)
class _Plan:
    """Where the gradients of one bucket lie among the blocks."""

    residual: Tensor  # 1D, whole blocks
    block: int
    chunks: list[_Chunk]

    @property
    def longest(self) -> int:
        """The elements of the longest chunk."""
        return max(chunk.stop - chunk.start for chunk in self.chunks)

    def parcels(self, parts: Sequence[Tensor]) -> list["Parcel"]:
        """What ``parts``, equal shares of the blocks, hold."""
        share = self.residual.numel() // len(parts)
        return [
            Parcel(part, self.block, index * share, self.residual)
            for index, part in enumerate(parts)
        ]


def _join(stretches: Sequence[_Stretch]) -> list[_Stretch]:
    joined: list[_Stretch] = []
    for each in stretches:
        if joined and each.start - joined[-1].start == each.at - joined[-1].at == joined[-1].size:
            last = joined.pop()
            each = _Stretch(last.start, last.at, last.size + each.size)
        joined.append(each)
    return joined


def _chunks(
    stretches: Sequence[_Stretch], share_size: int, shares: int, block: int
) -> list[_Chunk]:
    step = max(1, _CHUNK // block) * block
    chunks = []
    for share in range(shares):
        end = (share + 1) * share_size
        for start in range(share * share_size, end, step):
            stop = min(start + step, end)
            chunks.append(_Chunk(start, stop, share, _rows(_within(stretches, start, stop))))
    return chunks


def _within(stretches: Sequence[_Stretch], start: int, stop: int) -> list[_Stretch]:
    found = []
    for each in stretches:
        low, high = max(each.at, start), min(each.at + each.size, stop)
        if low < high:
            found.append(_Stretch(each.start + low - each.at, low, high - low))
    return found


def _rows(stretches: Sequence[_Stretch]) -> list[_Rows]:
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
    """The scales, then the integers, of some blocks, in one tensor of bytes.

    The blocks are those of ``like`` from ``origin`` on.
    """

    def __init__(self, content: Tensor, block: int, origin: int, like: Tensor) -> None:
        self.bytes = content
        self.origin = origin
        count = content.numel() // (block + like.element_size())
        size = count * like.element_size()
        self.scales = content[:size].view(like.dtype).view(count, 1)
        self.integers = content[size:].view(torch.int8).view(count, block)

    @staticmethod
    def size_of(values: Tensor, block: int) -> int:
        """The bytes that a parcel of ``values`` has."""
        return values.numel() // block * (block + values.element_size())

    def fill(self, values: Tensor, chunk: _Chunk) -> None:
        """Quantise ``values`` in the chunk, and leave in them what that has lost."""
        scales, integers = self.part(chunk)
        _quantise(chunk.of(values).view(integers.shape), scales, integers)

    def clear_undefined(self, values: Tensor) -> None:
        """A block that is infinite or undefined is sent as such, and must not stay so for ever."""
        if torch.isfinite(self.scales.sum()):
            return
        blocks = values[self.origin : self.origin + self.integers.numel()]
        blocks.view(self.integers.shape)[~torch.isfinite(self.scales.view(-1))] = 0

    def part(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Scales and integers of the blocks in the chunk."""
        block = self.integers.shape[1]
        first, last = (chunk.start - self.origin) // block, (chunk.stop - self.origin) // block
        return self.scales[first:last], self.integers[first:last]


def quantise(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """``values`` (1D, whole blocks) as int8, and the scale of each block.

    >>> integers, scales = quantise(torch.tensor([0.0, 1.0, -2.0, 127.0]), block=2)
    >>> integers.tolist()
    [[0, 127], [-2, 127]]
    """
    content = torch.empty(Parcel.size_of(values, block), dtype=torch.uint8)
    parcel = Parcel(content, block, 0, values)
    _quantise(values.clone().view(parcel.integers.shape), parcel.scales, parcel.integers)
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


def _mean(parcels: Sequence[Parcel], chunk: _Chunk, out: Tensor, spare: Tensor) -> None:
    """The mean of what the parcels hold in the chunk, added in the order of the ranks.

    The second half of ``spare`` is memory to work in.
    """
    scales, integers = parcels[0].part(chunk)
    total = out.view(integers.shape)
    values = spare[-out.numel() :].view(integers.shape)
    total.copy_(integers).mul_(scales / len(parcels))
    for parcel in parcels[1:]:
        scales, integers = parcel.part(chunk)
        total.addcmul_(values.copy_(integers), scales / len(parcels))
