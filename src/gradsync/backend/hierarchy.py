"""Several places: shared memory inside each, one flow of gloo's between them.

A place is a machine, or one rank of a machine whose ranks cannot share memory. Its first rank is
its leader. A tensor goes in chunks: the ranks of a place reduce a chunk into the leader's, the
leaders reduce it over the network, and each leader gives it to its place, while the next chunk is
reduced and the one after it is on the way. What works in another way goes through gloo between all
ranks.

[Note: flows] in flows.py is why the leaders' flows have memory of their own, and never the user's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from gradsync.backend._native import ReduceOp
from gradsync.backend.calls import describe
from gradsync.backend.engines import Engines
from gradsync.backend.flows import Clock
from gradsync.backend.hierarchy_base import HierarchyBase
from gradsync.backend.lane import Call
from gradsync.backend.places import check_memory, in_place, overwrite
from gradsync.backend.shared_memory import Started
from gradsync.errors import CollectiveMismatchError

Pieces = tuple[list[int], list[int]]  # bytes to each rank, and from each
CHUNK_BYTES = 4 * 1024 * 1024
GLOO_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
WIDER = {torch.bfloat16: torch.float32, torch.int16: torch.int32}  # what gloo cannot reduce


class Hierarchy(HierarchyBase):
    """Collectives over the ranks of several places; they run in order, on one thread."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._desks: dict[int, Tensor] = {}

    # ---------------------------------------------------------------- collectives

    def all_reduce(self, tensor: Tensor, op: ReduceOp, seconds: float, *, later: bool) -> Started:
        """Reduce ``tensor`` in place over all ranks of all places."""
        flat, finish = in_place(tensor)
        check_memory(flat)
        work = flat
        if op is ReduceOp.AVG and flat.dtype is torch.float16:
            work = flat.float()  # the sum of a machine might be too large
        chunks = _chunks(work)
        run = partial(self._all_reduce, chunks, op)
        name = f"all_reduce({op.name.lower()}, {describe(tensor)})"

        def bring_back() -> None:
            if work is not flat:
                overwrite(flat, work)
            if finish is not None:
                finish()

        return self._started(name, run, (tensor, work), seconds, later, bring_back)

    def _all_reduce(self, chunks: Sequence[Tensor], op: ReduceOp, clock: Clock) -> None:
        inside = ReduceOp.SUM if op is ReduceOp.AVG else op
        flows: list[tuple[dist.Work, Tensor]] = []
        for index in range(len(chunks) + 1):
            self.look(needs_neighbours=False)
            if index < len(chunks):
                chunk = chunks[index]
                self._reduce_here(chunk, inside, clock)
                if self._is_leader:
                    flows.append(self._reduce_between(chunk, index, op, clock))
            if index > 0:
                chunk = chunks[index - 1]
                if self._is_leader:
                    flow, copy = flows.pop(0)
                    self.await_flow(flow, clock, needs_neighbours=True)
                    if op is ReduceOp.AVG and copy.is_floating_point():
                        copy.div_(self._world)  # before it is rounded to the dtype of the chunk
                    overwrite(chunk, copy)
                    if op is ReduceOp.AVG and not copy.is_floating_point():
                        overwrite(chunk, chunk.div(self._world, rounding_mode="trunc"))
                self._broadcast_here(chunk, 0, clock)

    def _reduce_between(
        self, chunk: Tensor, index: int, op: ReduceOp, clock: Clock
    ) -> tuple[dist.Work, Tensor]:
        copy = self._desk(index, chunk, WIDER.get(chunk.dtype, chunk.dtype)).copy_(chunk)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(GLOO_OPS[op])
        options.timeout = clock.timeout
        return self._engines.gloo().allreduce([copy], options), copy

    def broadcast(self, tensor: Tensor, root: int, seconds: float, *, later: bool) -> Started:
        """Overwrite ``tensor`` on all ranks with that of rank ``root`` of the group."""
        flat, finish = in_place(tensor)
        check_memory(flat)
        line = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride
        chunks = _chunks(line.view(torch.uint8))
        source = next(
            index
            for index, place in enumerate(self._places)
            if any(member.rank == root for member in place)
        )
        at = [member.rank for member in self._places[source]].index(root)
        run = partial(self._broadcast, chunks, source, at)
        name = f"broadcast(root {root}, {describe(tensor)})"
        return self._started(name, run, (tensor, flat), seconds, later, finish)

    def _broadcast(self, chunks: Sequence[Tensor], source: int, at: int, clock: Clock) -> None:
        flows: list[tuple[dist.Work, Tensor]] = []
        is_source = self._here == source
        for index in range(len(chunks) + 1):
            self.look(needs_neighbours=False)
            if index < len(chunks):
                chunk = chunks[index]
                if is_source:
                    self._broadcast_here(chunk, at, clock)
                if self._is_leader:
                    flows.append(self._broadcast_between(chunk, index, source, clock))
            if index > 0:
                chunk = chunks[index - 1]
                if self._is_leader:
                    flow, copy = flows.pop(0)
                    # The source's neighbours have what they need, and may be gone.
                    self.await_flow(flow, clock, needs_neighbours=not is_source)
                    if not is_source:
                        overwrite(chunk, copy)
                if not is_source:
                    self._broadcast_here(chunk, 0, clock)

    def _broadcast_between(
        self, chunk: Tensor, index: int, source: int, clock: Clock
    ) -> tuple[dist.Work, Tensor]:
        copy = self._desk(index, chunk, chunk.dtype)
        if self._here == source:
            copy.copy_(chunk)
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = clock.timeout
        return self._engines.gloo().broadcast([copy], options), copy

    def _reduce_here(self, chunk: Tensor, op: ReduceOp, clock: Clock) -> None:
        if self.memory.size > 1:
            self.memory.reduce(chunk, op, 0, clock.left, later=False).handle.wait()

    def _broadcast_here(self, chunk: Tensor, root: int, clock: Clock) -> None:
        if self.memory.size > 1:
            self.memory.broadcast(chunk, root, clock.left, later=False).handle.wait()

    def _desk(self, index: int, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the leader's for a flow. Two are under way at a time, so there are two."""
        size = chunk.numel() * dtype.itemsize
        desk = self._desks.get(index % 2)
        if desk is None or desk.numel() < size:
            desk = self._desks[index % 2] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return desk[:size].view(dtype).view(chunk.shape)

    def barrier(self, seconds: float, *, later: bool) -> Started:
        """Wait until all ranks of all places have come here."""

        def leave_together(clock: Clock) -> None:  # all have come, when the leaders have agreed
            self.memory.barrier(clock.left, later=False).handle.wait()

        return self._started("barrier", leave_together, None, seconds, later)

    def collective(
        self,
        name: str,
        call: Call,
        engines: Engines,
        kept: object,
        seconds: float,
        *,
        later: bool,
        pieces: Pieces | None = None,
    ) -> Started:
        """Run ``call`` with gloo between all ranks. ``pieces`` are those of an all-to-all."""

        def run(clock: Clock) -> None:
            # Who passes this knows that the leaders agree, in its own place and so in all.
            self.memory.barrier(clock.left, later=False).handle.wait()
            if pieces is not None:
                self._compare(pieces, engines, clock)
            self.through_gloo(call, engines, clock)

        return self._started(f"{name} through gloo", run, kept, seconds, later)

    def _compare(self, pieces: Pieces, engines: Engines, clock: Clock) -> None:
        """See that every rank expects what the others send: all ranks draw the same conclusion."""
        own = torch.tensor([*pieces[0], *pieces[1]], device="cpu")
        rows = [torch.empty_like(own) for _ in range(self._world)]
        options = AllgatherOptions()
        options.timeout = clock.timeout
        self.through_gloo(lambda gloo: gloo.allgather([rows], [own], options), engines, clock)
        table = torch.stack(rows)  # 2D: what each sends to each, and expects from each
        differs = table[:, : self._world] != table[:, self._world :].t()
        if differs.any():
            source, target = differs.nonzero()[0].tolist()
            names = {each.rank: each.label for place in self._places for each in place}
            raise CollectiveMismatchError(
                f"collective {self._board.progress} is not the same on all ranks: "
                f"{names[source]} sends {table[source, target]} bytes to {names[target]}, which "
                f"expects {table[target, self._world + source]}."
            )


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.reshape(-1)  # 1D
    return list(flat.split(max(1, CHUNK_BYTES // flat.element_size()))) if flat.numel() else [flat]
