"""What collectives have to give: computed in one process, from what every rank hands in."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

Op = dist.ReduceOp
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NARROW = (torch.float16, torch.bfloat16)
FLOATS = (*NARROW, torch.float32, torch.float64)
ARITHMETIC = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
BITWISE = (Op.BAND, Op.BOR, Op.BXOR)

SMALL = 32 * 1024  # bytes: up to here one exchange does it all
CHUNK = 512 * 1024  # bytes of an all-reduce that go in one piece beyond it, at most
SLOT = 1024 * 1024  # and of the others


def values(rank: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What a rank hands in: the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-100, 100, (size,), generator=generator).to(dtype)


def reduced(tensors: list[Tensor], op: Op.RedOpType) -> Tensor:
    """In the order of ranks; 16-bit numbers in float32, rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in NARROW else dtype
    total = reduce(_combine(op), [tensor.to(wide) for tensor in tensors])
    if op == Op.AVG:
        if dtype in INTEGERS:
            total = torch.div(total, len(tensors), rounding_mode="trunc")
        else:
            total = total * torch.tensor(1 / len(tensors), dtype=wide)
    return total.to(dtype)


def _combine(op: Op.RedOpType) -> Callable[[Tensor, Tensor], Tensor]:
    return {
        Op.SUM: torch.add,
        Op.AVG: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }[op]


def assert_equal(ours: Tensor, theirs: Tensor, hint: object) -> None:
    """Bitwise, NaN included."""
    assert ours.dtype == theirs.dtype, hint
    assert ours.shape == theirs.shape, hint
    same = torch.equal(
        ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
    )
    assert same, f"{hint}: {ours} and {theirs}"
