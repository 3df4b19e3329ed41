"""One collective by one contender: what is called, and whether it did its work.

A size is that of the tensor which is the same on all ranks: the input; for scatter the output.
Our side averages; gloo and OpenMPI have no average and only sum, which spares them the division.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GLOO, SYMMETRIC, COPIED, OPENMPI = "gloo", "symmetric", "copied", "openmpi"
PERSISTENT, BARE, FRONT = "persistent", "bare", "front"
ALL_REDUCE = "all_reduce"
DTYPE = torch.float32
ROOT = 0
LINE = 32  # elements in two cache lines: where the bare limit's slices are cut

CONTENDERS = {
    GLOO: "torch's gloo, sum",
    SYMMETRIC: "gradsync, avg, a tensor from symmetric_empty",
    COPIED: "gradsync, avg, any tensor",
    OPENMPI: "OpenMPI through mpi4py, sum",
    PERSISTENT: "gradsync, avg, run() of a persistent_all_reduce of such a tensor",
    BARE: "the reduction alone: every rank its slice, no synchronisation",
    FRONT: "torch's all_reduce in front of a group that does nothing",
}


@dataclass(frozen=True)
class Exercise:
    contender: str
    call: Callable[[], object]
    fill: Callable[[], object]  # with values that tell the ranks apart
    is_right: Callable[[], bool]  # after `fill` and one `call` on all ranks
    kept: list[object] = field(default_factory=list)

    def run(self, times: int) -> None:
        call = self.call
        for _ in range(times):
            call()


@dataclass(frozen=True)
class Groups:
    """What the contenders communicate through."""

    gloo: Any
    gradsync: Any
    mpi: Any  # mpi4py's module MPI, or None

    @classmethod
    def build(cls, *, with_mpi: bool) -> Groups:
        import gradsync  # noqa: F401  (it makes the backend known)

        mpi = None
        if with_mpi:
            from mpi4py import MPI as mpi
        return cls(dist.new_group(backend="gloo"), dist.new_group(backend="gradsync"), mpi)


def prepare(operation: str, contender: str, count: int, groups: Groups) -> Exercise:
    if operation == ALL_REDUCE:
        return ALL_REDUCES[contender](count, groups)
    group = groups.gloo if contender == GLOO else groups.gradsync
    return OTHERS[operation](contender, count, group)


# ------------------------------------------------------------------------- all-reduce


def _values(tensor: Tensor) -> None:
    torch.arange(tensor.numel(), out=tensor).remainder_(7).add_(dist.get_rank() + 1)


def _holds(tensor: Tensor, factor: float) -> bool:
    """`factor` times the average over the ranks of what `_values` has put there."""
    expected = torch.arange(tensor.numel(), dtype=DTYPE).remainder_(7)
    expected.add_((dist.get_world_size() + 1) / 2).mul_(factor)
    is_right = torch.allclose(tensor, expected)
    tensor.zero_()  # what is summed up again and again stays a number
    return is_right


def _by_gloo(count: int, groups: Groups) -> Exercise:
    tensor = torch.empty(count, dtype=DTYPE)
    call = partial(dist.all_reduce, tensor, dist.ReduceOp.SUM, group=groups.gloo)
    right = partial(_holds, tensor, dist.get_world_size())
    return Exercise(GLOO, call, partial(_values, tensor), right)


def _by_gradsync(contender: str, count: int, groups: Groups) -> Exercise:
    if contender == SYMMETRIC:
        tensor = groups.gradsync.symmetric_empty(count, DTYPE)
    else:
        tensor = torch.empty(count, dtype=DTYPE)
    call = partial(dist.all_reduce, tensor, dist.ReduceOp.AVG, group=groups.gradsync)
    return Exercise(contender, call, partial(_values, tensor), partial(_holds, tensor, 1))


def _by_openmpi(count: int, groups: Groups) -> Exercise:
    mpi = groups.mpi
    tensor = torch.empty(count, dtype=DTYPE)
    call = partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, [tensor.numpy(), mpi.FLOAT], op=mpi.SUM)
    right = partial(_holds, tensor, dist.get_world_size())
    return Exercise(OPENMPI, call, partial(_values, tensor), right)


def _bare(count: int, groups: Groups) -> Exercise:
    """The kernel of the symmetric all-reduce on memory of the same kind, without what makes it
    safe: every rank reduces its slice, from all ranks' memory into all ranks' memory.
    """
    from gradsync.backend import _native

    rank, world = dist.get_rank(), dist.get_world_size()
    parts = _map_each_others(count * DTYPE.itemsize, groups.gloo)
    begin, end = (min(count, -(-count // LINE) * r // world * LINE) for r in (rank, rank + 1))
    addresses = [part.data_ptr() for part in parts]
    numbers = int(_native.DType.FLOAT32), int(_native.ReduceOp.AVG)
    call = partial(_native.reduce_bare, addresses, begin, end, *numbers)
    own = parts[rank]
    return Exercise(BARE, call, partial(_values, own), partial(_holds, own, 1), [parts])


def _by_persistent(count: int, groups: Groups) -> Exercise:
    tensor = groups.gradsync.symmetric_empty(count, DTYPE)
    call = groups.gradsync.persistent_all_reduce(tensor).run
    return Exercise(PERSISTENT, call, partial(_values, tensor), partial(_holds, tensor, 1))


class IdleGroup(dist.ProcessGroup):
    """Leaves tensors as they are."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        """Nothing: torch takes it for a group that has waited already."""


def _front(count: int, groups: Groups) -> Exercise:
    tensor = torch.zeros(count, dtype=DTYPE)
    call = partial(dist.all_reduce, tensor, dist.ReduceOp.AVG, group=IdleGroup())
    return Exercise(FRONT, call, tensor.zero_, lambda: not tensor.any())


def _map_each_others(size: int, group: Any) -> list[Tensor]:
    """A tensor of every rank's, in memory that all of them map."""
    own = os.memfd_create("gradsync-bare")
    os.posix_fallocate(own, 0, size)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, f"/proc/{os.getpid()}/fd/{own}", group=group)
    tensors = []
    for place in places:
        descriptor = os.open(place, os.O_RDWR)
        tensors.append(torch.frombuffer(mmap.mmap(descriptor, size), dtype=DTYPE))
        os.close(descriptor)
    dist.barrier(group=group)  # all have it by now
    os.close(own)
    return tensors


ALL_REDUCES: dict[str, Callable[[int, Groups], Exercise]] = {
    GLOO: _by_gloo,
    SYMMETRIC: partial(_by_gradsync, SYMMETRIC),
    COPIED: partial(_by_gradsync, COPIED),
    OPENMPI: _by_openmpi,
    PERSISTENT: _by_persistent,
    BARE: _bare,
    FRONT: _front,
}


# ------------------------------------------------------------------------- the others


def _broadcast(contender: str, count: int, group: Any) -> Exercise:
    tensor = torch.empty(count, dtype=DTYPE)
    call = partial(dist.broadcast, tensor, ROOT, group=group)
    return Exercise(contender, call, partial(_mark, tensor), partial(_all_are, tensor, ROOT + 1))


def _all_gather(contender: str, count: int, group: Any) -> Exercise:
    own = torch.empty(count, dtype=DTYPE)
    output = torch.empty(dist.get_world_size() * count, dtype=DTYPE)
    function = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    call = partial(function, output, own, group=group)
    return Exercise(contender, call, partial(_mark, own), partial(_is_every_ranks, output))


def _reduce_scatter(contender: str, count: int, group: Any) -> Exercise:
    world = dist.get_world_size()
    source = torch.empty(max(1, count // world) * world, dtype=DTYPE)
    output = torch.empty(source.numel() // world, dtype=DTYPE)
    function = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    call = partial(function, output, source, group=group)
    right = partial(_all_are, output, world * (world + 1) / 2)
    return Exercise(contender, call, partial(_mark, source), right)


def _all_to_all(contender: str, count: int, group: Any) -> Exercise:
    world = dist.get_world_size()
    source = torch.empty(max(1, count // world) * world, dtype=DTYPE)
    output = torch.empty_like(source)
    call = partial(dist.all_to_all_single, output, source, group=group)
    return Exercise(contender, call, partial(_mark, source), partial(_is_every_ranks, output))


def _gather(contender: str, count: int, group: Any) -> Exercise:
    own = torch.empty(count, dtype=DTYPE)
    output = torch.empty(dist.get_world_size() * count, dtype=DTYPE)
    outputs = list(output.chunk(dist.get_world_size())) if dist.get_rank() == ROOT else None
    call = partial(dist.gather, own, outputs, ROOT, group=group)
    right = partial(_is_every_ranks, output) if outputs else _nothing_to_see
    return Exercise(contender, call, partial(_mark, own), right)


def _scatter(contender: str, count: int, group: Any) -> Exercise:
    output = torch.empty(count, dtype=DTYPE)
    ranks = range(dist.get_world_size())
    sources = [torch.full((count,), rank + 1.0) for rank in ranks]
    call = partial(
        dist.scatter, output, sources if dist.get_rank() == ROOT else None, ROOT, group=group
    )
    right = partial(_all_are, output, dist.get_rank() + 1)
    return Exercise(contender, call, output.zero_, right)


def _reduce(contender: str, count: int, group: Any) -> Exercise:
    tensor = torch.empty(count, dtype=DTYPE)
    world = dist.get_world_size()
    call = partial(dist.reduce, tensor, ROOT, group=group)
    right = partial(_all_are, tensor, world * (world + 1) / 2)
    is_root = dist.get_rank() == ROOT
    return Exercise(contender, call, partial(_mark, tensor), right if is_root else _nothing_to_see)


def _barrier(contender: str, count: int, group: Any) -> Exercise:
    return Exercise(contender, partial(dist.barrier, group=group), _nothing_to_see, _nothing_to_see)


def _ping_pong(contender: str, count: int, group: Any) -> Exercise:
    """There and back again between ranks 0 and 1, 2 and 3, and so on, all pairs at once."""
    rank, tensor = dist.get_rank(), torch.empty(count, dtype=DTYPE)
    other = rank ^ 1
    if other >= dist.get_world_size():
        return Exercise(contender, _nothing_to_see, _nothing_to_see, _nothing_to_see)

    def ping() -> None:
        dist.send(tensor, other, group=group)
        dist.recv(tensor, other, group=group)

    def pong() -> None:
        dist.recv(tensor, other, group=group)
        dist.send(tensor, other, group=group)

    call, right = (pong, partial(_all_are, tensor, other + 1))
    if rank < other:
        call, right = (ping, partial(_all_are, tensor, rank + 1))
    return Exercise(contender, call, partial(_mark, tensor), right)


OTHERS: dict[str, Callable[[str, int, Any], Exercise]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "reduce": _reduce,
    "barrier": _barrier,
    "ping_pong": _ping_pong,
}


def _nothing_to_see() -> bool:
    return True


def _mark(tensor: Tensor) -> None:
    tensor.fill_(dist.get_rank() + 1.0)


def _all_are(tensor: Tensor, value: float) -> bool:
    are_all = bool((tensor == value).all())
    tensor.zero_()  # what is summed up again and again stays a number
    return are_all


def _is_every_ranks(tensor: Tensor) -> bool:
    pieces = tensor.chunk(dist.get_world_size())
    return all(_all_are(piece, rank + 1) for rank, piece in enumerate(pieces))
