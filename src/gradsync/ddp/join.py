"""Uneven inputs: a rank that has run out of them takes part in the steps of the others.

Inside ``ddp.join()`` each forward begins with torch's notification that this rank goes on, and
each forward tells whether its backward will be reduced. A rank that has joined mirrors all of
it: the same collectives in the same order, with zeros for gradients. At the end all ranks take the
model of the last one to join.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from gradsync.ddp.collectives import wait

if TYPE_CHECKING:
    from gradsync.ddp.wrapper import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """What a rank does for one DDP module once its own inputs are used up."""

    def __init__(self, ddp: "DistributedDataParallel", *, divide_by_initial: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial

    def main_hook(self) -> None:
        """Mirror one forward and backward of the ranks that go on."""
        ddp = self._ddp
        ddp.reducer.raise_deferred()
        if ddp._has_buffers and ddp._syncs_buffers_before_forward():
            ddp._sync_module_buffers(common_rank(ddp, candidate=False))
        reduces = tell_whether_reduced(ddp, False)
        ddp.require_forward_param_sync = reduces
        if reduces:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of the last rank to join."""
        self._ddp._sync_final_model(is_last_joiner)


def begin_forward(ddp: "DistributedDataParallel") -> None:
    """This rank goes on; raises if another has run out of inputs and that is to end training."""
    work = Join.notify_join_context(ddp)
    if work is not None and not ddp._divide_by_initial_world_size:
        ddp.reducer.divide_by(work)


def common_rank(ddp: "DistributedDataParallel", *, candidate: bool) -> int:
    """The highest rank of those that are candidates: all ranks get the same answer."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    assert int(rank) >= 0, "there is always a candidate"
    return int(rank)


def tell_whether_reduced(ddp: "DistributedDataParallel", mine: bool) -> bool:
    """Tell the ranks that have joined whether a backward is to be mirrored; is it?"""
    reduced = torch.full((1,), float(mine), device=ddp.device)
    group = ddp.process_group
    work = dist.all_reduce(reduced, group=group, async_op=True)
    wait(work, group, lambda: "the agreement on whether this step is reduced (join)")
    return bool(reduced.item())
