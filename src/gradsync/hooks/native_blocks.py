"""Blocks whose arithmetic is native (csrc/quantise.cc): one pass over memory for each call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.backend._native import DType, Quantiser
from gradsync.hooks.blocks import Blocks, Layout

_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
}


class NativeBlocks(Blocks):
    """For gradients of up to 32 bits on the CPU; the residual is float32."""

    @staticmethod
    def can_take(buffer: Tensor) -> bool:
        """Are there kernels for these gradients?"""
        return buffer.is_cpu and buffer.dtype in _DTYPES and buffer.is_contiguous()

    def __init__(self, layout: Layout, residual: Tensor, buffer: Tensor) -> None:
        super().__init__(layout, residual)
        self._quantiser = Quantiser(
            _DTYPES[buffer.dtype],
            buffer.numel(),
            layout.length,
            layout.block,
            layout.shares,
            layout.joined(),
        )
        self._gradients = buffer.numel()
        self._part_size = self.message_size // layout.shares
        self._residual = _address(residual, layout.length)

    def fill(self, buffer: Tensor, message: Tensor) -> None:
        """See `Blocks.fill`."""
        self._quantiser.fill(
            _address(buffer, self._gradients), self._residual, _address(message, self.message_size)
        )

    def mean(self, messages: Sequence[Tensor], buffer: Tensor) -> None:
        """See `Blocks.mean`."""
        self._quantiser.mean(
            [_address(message, self.message_size) for message in messages],
            _address(buffer, self._gradients),
        )

    def requantise(self, parts: Sequence[Tensor], share: int, answer: Tensor) -> None:
        """See `Blocks.requantise`."""
        self._quantiser.requantise(
            [_address(part, self._part_size) for part in parts],
            share,
            self._residual,
            _address(answer, self._part_size),
        )


def _address(tensor: Tensor, size: int) -> int:
    """Where so many elements are: the native side takes it on trust."""
    assert tensor.numel() == size, f"{tensor.numel()} elements, not {size}"
    assert tensor.is_contiguous()
    return tensor.data_ptr()
