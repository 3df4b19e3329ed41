"""What a caller hands in: checked before anything is announced to the other ranks."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from gradsync.backend._native import ReduceOp
from gradsync.errors import ArgumentError

REDUCE_OPS = {  # by their hashes, which are their numbers and quick to look up
    hash(dist.ReduceOp(theirs)): ours
    for theirs, ours in (
        (dist.ReduceOp.SUM, ReduceOp.SUM),
        (dist.ReduceOp.AVG, ReduceOp.AVG),
        (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
        (dist.ReduceOp.MIN, ReduceOp.MIN),
        (dist.ReduceOp.MAX, ReduceOp.MAX),
        (dist.ReduceOp.BAND, ReduceOp.BAND),
        (dist.ReduceOp.BOR, ReduceOp.BOR),
        (dist.ReduceOp.BXOR, ReduceOp.BXOR),
    )
}


def reduce_op(opts: Any) -> ReduceOp | None:
    """Ours for torch's; None if there is none."""
    return REDUCE_OPS.get(hash(opts.reduceOp))


def known_op(op: Any) -> ReduceOp:
    """The same for an operation by itself, which has to be one of ours."""
    options = AllreduceOptions()
    try:
        options.reduceOp = op
    except TypeError:
        raise ArgumentError(f"op must be a torch.distributed.ReduceOp, not {op!r}.") from None
    ours = reduce_op(options)
    if ours is None:
        raise ArgumentError(f"There is no {op} in shared memory.")
    return ours


def check_flat(count: Any, dtype: Any) -> None:
    """There can be a flat tensor of that."""
    try:
        is_count = operator.index(count) >= 0
    except TypeError:
        is_count = False
    if not is_count or not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"Symmetric memory is for a number of elements, and a torch.dtype; got {count!r} and "
            f"{dtype!r}. It is flat: give it another shape by view()."
        )


def only(items: Any) -> Any:
    """The one tensor, or list of tensors, of a call that takes one for each device."""
    if isinstance(items, Tensor):
        return items
    if len(items) != 1:
        raise ArgumentError(f"Exactly one tensor a rank is supported, got {len(items)}.")
    return items[0]


def check_rank(role: str, rank: int, size: int) -> int:
    """``rank`` is one of the group."""
    if not 0 <= rank < size:
        raise ArgumentError(f"The {role}, group rank {rank}, is not in this group of {size} ranks.")
    return rank


def check_pieces(kind: str, pieces: Sequence[Tensor], like: Tensor, size: int) -> None:
    """There is one for each of ``size`` ranks, and each can hold what ``like`` does."""
    if not like.is_cpu:
        return  # engines of other devices have rules of their own
    count, dtype = like.numel(), like.dtype
    if len(pieces) != size:
        raise ArgumentError(
            f"There must be one {kind} tensor for each of the {size} ranks; got {len(pieces)}."
        )
    for index, piece in enumerate(pieces):
        if piece.numel() != count or piece.dtype != dtype:
            raise ArgumentError(
                f"Every {kind} tensor must have {count} elements of {dtype}, as the other tensor "
                f"of this rank has; number {index} has {piece.numel()} of {piece.dtype}."
            )


def check_whole(kind: str, whole: Tensor, part: Tensor, size: int) -> None:
    """``whole`` can hold a ``part`` for each of ``size`` ranks."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ArgumentError(
            f"The {kind} tensor must have {size} times the {part.numel()} elements of the other, "
            f"and its dtype, {part.dtype}; got {whole.numel()} of {whole.dtype}."
        )


def check_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """There is one tensor of each kind for each of ``size`` ranks, and all have one dtype."""
    if len(outputs) != size or len(inputs) != size:
        raise ArgumentError(
            f"all_to_all takes {size} tensors of each kind, one for each rank; got "
            f"{len(outputs)} outputs and {len(inputs)} inputs."
        )
    check_alike(*outputs, *inputs)


def check_alike(*tensors: Tensor) -> None:
    """All of an all-to-all have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ArgumentError(
            f"all_to_all takes tensors of one dtype; got {', '.join(sorted(map(str, dtypes)))}."
        )


def check_peer(role: str, rank: int, own: int, size: int) -> int:
    """``rank`` is another one of the group."""
    if rank == own:
        raise ArgumentError(f"The {role}, group rank {rank}, is this rank itself.")
    return check_rank(role, rank, size)


def split(kind: str, whole: Tensor, sizes: Sequence[int] | None, size: int) -> list[int]:
    """Bytes of the parts along the first dimension, which are equal without ``sizes``."""
    rows = whole.shape[0] if whole.dim() else 0
    if not sizes:
        if rows % size:
            raise ArgumentError(
                f"Tensor's dim 0 does not divide equally across group size: {kind} has {rows} "
                f"rows for {size} ranks."
            )
        sizes = [rows // size] * size
    if sum(sizes) != rows or len(sizes) != size or min(sizes) < 0:
        raise ArgumentError(
            f"Split sizes doesn't match total dim 0 size: {kind} has {rows} rows, the split "
            f"sizes are {list(sizes)} for {size} ranks."
        )
    row = whole.nbytes // rows if rows else 0
    return [row * count for count in sizes]
