"""Every collective as a function of a group, to be run on ours and on gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from oracle import Op, values
from torch import Tensor

Group = dist.ProcessGroup
GAP = 77


def maker(rank: int, size: int, dtype: torch.dtype) -> Callable[[int], Tensor]:
    return lambda seed: values(rank, size, dtype, seed)


def reduce_to_each(group: Group | None, world: int, make: Callable, op: Op) -> list[Tensor]:
    results = []
    for root in range(world):
        tensor = make(root)
        dist.reduce(tensor, root, op, group=group)
        results += [tensor] if dist.get_rank() == root else []  # gloo's others are undefined
    return results


def reduce_scatter_list(group: Group | None, world: int, make: Callable, op: Op) -> list[Tensor]:
    pieces = list(make(1).view(world, -1))
    output = torch.empty_like(pieces[0])
    dist.reduce_scatter(output, pieces, op, group=group)
    return [output]


def reduce_scatter_tensor(group: Group | None, world: int, make: Callable, op: Op) -> list[Tensor]:
    whole = make(2)
    output = whole.new_empty(whole.numel() // world)
    dist.reduce_scatter_tensor(output, whole, op, group=group)
    return [output]


def reduce_scatter_coalesced(group: Group | None, world: int, make: Callable, op: Op) -> list:
    outputs = []
    with dist.distributed_c10d._coalescing_manager(group):
        for seed in (3, 4):
            whole = make(seed)
            outputs.append(whole.new_empty(whole.numel() // world))
            dist.reduce_scatter_tensor(outputs[-1], whole, op, group=group)
    return outputs


def all_reduce_coalesced(group: Group | None, world: int, make: Callable, op: Op) -> list[Tensor]:
    tensors = [make(5), make(6)[:3]]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, op, group=group)
    return tensors


REDUCTIONS = (
    reduce_to_each,
    reduce_scatter_list,
    reduce_scatter_tensor,
    reduce_scatter_coalesced,
    all_reduce_coalesced,
)


class Maker:
    """Flat tensors of one rank, as they are or, for gloo, as the bytes that they are made of."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype, *, as_bytes: bool) -> None:
        self.rank, self.size, self.dtype = rank, size, dtype
        self.as_bytes = as_bytes
        self.unit = dtype.itemsize if as_bytes else 1  # elements handed over for each of ours

    def __call__(self, seed: int, size: int | None = None) -> Tensor:
        tensor = values(self.rank, self.size if size is None else size, self.dtype, seed)
        return tensor.view(torch.uint8) if self.as_bytes else tensor

    def empty(self, size: int | None = None) -> Tensor:
        tensor = torch.zeros(self.size if size is None else size, dtype=self.dtype)
        return tensor.view(torch.uint8) if self.as_bytes else tensor


class WithGaps(Maker):
    """The same as every second element of something longer."""

    def __call__(self, seed: int, size: int | None = None) -> Tensor:
        return _with_gaps(super().__call__(seed, size))

    def empty(self, size: int | None = None) -> Tensor:
        return _with_gaps(super().empty(size))


def _with_gaps(tensor: Tensor) -> Tensor:
    wide = torch.full((2 * tensor.numel(),), GAP, dtype=tensor.dtype)
    wide[::2] = tensor
    return wide[::2]


def gaps_are_untouched(tensor: Tensor) -> bool:
    if tensor._base is None or not tensor.numel() or tensor.stride() != (2,):
        return True
    return bool(tensor._base[1::2].eq(GAP).all())


def broadcast(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    tensors = [make(root) for root in range(world)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, root, group=group)
    return tensors


def all_gather_list(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    outputs = [make.empty() for _ in range(world)]
    dist.all_gather(outputs, make(1), group=group)
    return outputs


def all_gather_tensor(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    output = make.empty(make.size * world)
    dist.all_gather_into_tensor(output, make(2), group=group)
    return [output]


def all_gather_coalesced(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    rows = [[make.empty(), make.empty(3)] for _ in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(rows, [make(3), make(4, 3)], group=group)
    return [tensor for row in rows for tensor in row]


def gather(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    results = []
    for root in range(world):
        outputs = [make.empty() for _ in range(world)] if make.rank == root else None
        dist.gather(make(5 + root), outputs, root, group=group)
        results += outputs or []
    return results


def scatter(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    results = []
    for root in range(world):
        pieces = [make(10 + r) for r in range(world)] if make.rank == root else None
        results.append(make.empty())
        dist.scatter(results[-1], pieces, root, group=group)
    return results


def all_to_all_even(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    output = make.empty(make.size * world)
    dist.all_to_all_single(output, make(20, make.size * world), group=group)
    return [output]


def all_to_all_uneven(group: Group | None, world: int, make: Maker) -> list[Tensor]:
    """Rank a sends rank b ``size`` elements for each step of a + b; 0 to itself if it is 0."""
    sizes = [make.size * (make.rank + other) for other in range(world)]
    splits = [size * make.unit for size in sizes]
    output = make.empty(sum(sizes))
    dist.all_to_all_single(output, make(21, sum(sizes)), splits, splits, group=group)
    return [output]


MOVES = (
    broadcast,
    all_gather_list,
    all_gather_tensor,
    all_gather_coalesced,
    gather,
    scatter,
    all_to_all_even,
    all_to_all_uneven,
)


def check_against_gloo(rank: int, world: int) -> None:
    """All of them on the default group, with and without gaps, and on gloo."""
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.int64):
        usual, gaps = (kind(rank, 6 * world, dtype, as_bytes=False) for kind in (Maker, WithGaps))
        for case in MOVES:
            right = case(gloo, world, usual)
            check_alike(case.__name__, [case(None, world, make) for make in (usual, gaps)], right)
        for case in REDUCTIONS:
            right = case(gloo, world, usual, Op.SUM)
            ours = [case(None, world, make, Op.SUM) for make in (usual, gaps)]
            check_alike(case.__name__, ours, right)
    pair = [rank, rank ^ 1]
    if max(pair) < world:
        tensor = gaps(30)
        if rank % 2:
            dist.recv(tensor, rank - 1)
            assert torch.equal(tensor, values(rank - 1, usual.size, torch.int64, 30))
            assert gaps_are_untouched(tensor)
        else:
            dist.send(tensor, rank + 1)
    negated = torch._neg_view(torch.tensor([float(rank), -1.0]))
    dist.reduce(negated, 0, Op.MAX)
    if rank == 0:
        assert negated.tolist() == [0.0, 1.0]
    matrix = torch.zeros(4, 2, dtype=torch.bool)
    matrix[rank, 0] = True
    dist.all_reduce(matrix[:, 0], Op.MAX)
    assert matrix[:world, 0].all()
    assert not matrix[:, 1].any()


def check_alike(name: str, ours: list[list[Tensor]], right: list[Tensor]) -> None:
    for results in ours:
        for got, expected in zip(results, right, strict=True):
            torch.testing.assert_close(got, expected)  # gloo adds in another order
            assert gaps_are_untouched(got), name
