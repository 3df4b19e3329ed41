"""Gradients travel as 8-bit integers with one scale a block; what is lost comes with the next step.

[Note: two quantisations]
Two ranks send each other everything, and each dequantises both parts. With more ranks that
would grow with their number, so there each rank gets a share of every rank's integers, averages
them, and sends the mean to all, quantised again. The error of that second quantisation is known
to one rank only, which adds it to its own residual, times the number of ranks: so the next mean
makes up for it, and there is no second set of residuals.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsync.errors import ArgumentError
from gradsync.hooks import wire
from gradsync.hooks.base import Hook, Round, Rounds, compute_dtype
from gradsync.hooks.blocks import Blocks, Layout
from gradsync.hooks.memory import Owner, ParameterMemory, PerBucket, Roster, places_of
from gradsync.hooks.native_blocks import NativeBlocks
from gradsync.hooks.torch_blocks import TorchBlocks

_LONGEST_BLOCK = 1 << 18


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
        if not 8 <= block <= _LONGEST_BLOCK or block % 8:
            raise ArgumentError(
                f"block must be a multiple of 8 from 8 to {_LONGEST_BLOCK}, not {block}"
            )
        self.block = block
        self._roster = Roster()
        self._plans: PerBucket[Blocks] = PerBucket(self._roster)
        self._residuals = ParameterMemory(self._roster)

    def __repr__(self) -> str:
        return f"Int8(block={self.block})"

    def reduce(self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup) -> Rounds:
        """See `Hook.reduce`."""
        world = group.size()
        shares = 1 if world == 2 else world
        blocks = self._plans.get(bucket, lambda: self._plan(bucket, buffer, shares))
        how = self._exchange if world == 2 else self._deal
        return how(bucket, buffer, group, blocks)

    def carries_report(self, world: int) -> bool:
        """See `Hook.carries_report`."""
        is_ours = type(self).reduce is Int8.reduce and type(self).__call__ is Hook.__call__
        return world == 2 and is_ours

    def _exchange(
        self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup, blocks: Blocks
    ) -> Rounds:
        """Of two ranks; what is behind the gradients travels as it is."""
        gradients, rest = buffer[: blocks.end], buffer[blocks.end :]
        size = blocks.message_size
        message, theirs = self._messages(bucket, buffer, size + rest.nbytes)
        blocks.fill(gradients, message[:size])
        message[size:].copy_(rest.view(torch.uint8))
        parts, work = wire.share(group, message, theirs)
        yield Round(work, last=True)
        blocks.mean([part[:size] for part in parts], gradients)
        first, second = (part[size:].view(rest.dtype) for part in parts)
        torch.add(first, second, out=rest).div_(2)

    def _deal(
        self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup, blocks: Blocks
    ) -> Rounds:
        """Of more ranks, see [Note: two quantisations]."""
        world, rank = group.size(), group.rank()
        message, theirs = self._messages(bucket, buffer, blocks.message_size)
        blocks.fill(buffer, message)
        parts, work = wire.deal(group, message, theirs)
        yield Round(work, last=False)
        answer = message.chunk(world)[rank]
        blocks.requantise(parts, rank, answer)
        _, work = wire.share(group, answer, theirs)
        yield Round(work, last=True)
        blocks.mean([theirs], buffer)

    def _messages(self, bucket: GradBucket, buffer: Tensor, size: int) -> tuple[Tensor, Tensor]:
        mine, theirs = (
            self.scratch(bucket, role, size, torch.uint8, buffer.device)
            for role in ("mine", "theirs")
        )
        return mine, theirs

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

    def _plan(self, bucket: GradBucket, buffer: Tensor, shares: int) -> Blocks:
        """Each parameter starts a block, see [Note: whose numbers]."""
        places = places_of(bucket)
        layout = Layout.of([(start, size) for _, start, size in places], self.block, shares)
        owners = [
            Owner(place.parameter, stretch.at, stretch.size)
            for place, stretch in zip(places, layout.stretches, strict=True)
        ]
        dtype = compute_dtype(buffer.dtype)
        residual = self._residuals.lay_out(owners, layout.length, dtype, buffer.device)
        if NativeBlocks.can_take(buffer):
            return NativeBlocks(layout, residual, buffer[: layout.end])
        return TorchBlocks(layout, residual)
