"""Uneven inputs: a rank that has run out of them takes part in the steps of the others.

Inside ``ddp.join()`` each forward begins with torch's notification that this rank goes on, and
each forward tells whether its backward will be reduced. A rank that has joined mirrors all of
it: the same collectives in the same order, with zeros for gradients. At the end all ranks take the
model of the last one to join.
"""

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from gradsync.ddp.collectives import wait
from gradsync.ddp.futures import result_of

if TYPE_CHECKING:
    from gradsync.ddp.wrapper import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """What a rank does for one DDP module once its own inputs are used up."""

    def __init__(self, ddp: "DistributedDataParallel", *, divide_by_initial: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial
        ddp._had_uneven_inputs = True

    def main_hook(self) -> None:
        """Mirror one forward and backward of the ranks that go on."""
        ddp = self._ddp
        ranks = ranks_that_reduce(ddp, mine=False)
        reduces = ranks > 0
        if reduces:
            ddp.reducer.raise_deferred()
            if not ddp._divide_by_initial_world_size:
                ddp.reducer.divide_by(ranks)  # it may be the reduction that divides, on all ranks
        futures = self._sync_buffers(reduces)
        ddp.require_forward_param_sync = reduces
        if reduces:
            ddp.reducer.shadow()
        for future in futures:
            result_of(future, ddp.process_group, lambda: "the buffer hook")

    def _sync_buffers(self, reduces: bool) -> list[Any]:
        """As the forward does it, at its beginning or at its end."""
        ddp = self._ddp
        if not ddp.will_sync_module_buffers():
            return []
        if ddp.buffer_hook is not None:
            if not ddp.buffer_hook.before_forward and reduces:
                ddp.reducer.rebuild()  # which the others do at the beginning of the forward
            return ddp.buffer_hook.run(ddp.named_module_buffers)
        ddp._sync_module_buffers(common_rank(ddp, candidate=False))
        return []

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of the last rank to join, and leave the context."""
        self._ddp._sync_final_model(is_last_joiner)
        leave(self._ddp)


class UnevenInputs(Join):
    """``Join`` for one DDP module, which it leaves as it was also after an error.

    torch's own leaves its module in the context for ever: each later forward is announced to ranks
    that have joined, and a forward on one rank alone waits for the others.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            for ddp in self._joinables:
                leave(ddp)  # type: ignore[arg-type]


def leave(ddp: "DistributedDataParallel") -> None:
    """Let the forwards of ``ddp`` be announced to nobody, and divide by all ranks again."""
    ddp._join_config = _JoinConfig.construct_disabled_join_config()
    ddp.reducer.divide_by(ddp.process_group.size())


def begin_forward(ddp: "DistributedDataParallel") -> None:
    """This rank goes on; raises if another has run out of inputs and that is to end training."""
    Join.notify_join_context(ddp)
    reduces = ddp._asks_for_reduction()
    ranks = ranks_that_reduce(ddp, mine=reduces)
    if reduces and not ddp._divide_by_initial_world_size:
        ddp.reducer.divide_by(ranks)


def common_rank(ddp: "DistributedDataParallel", *, candidate: bool) -> int:
    """The highest rank of those that are candidates: all ranks get the same answer."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    assert int(rank) >= 0, "there is always a candidate"
    return int(rank)


def ranks_that_reduce(ddp: "DistributedDataParallel", *, mine: bool) -> int:
    """Tell the ranks that have joined whether a backward is to be mirrored; on how many is it?"""
    ranks = torch.full((1,), float(mine), device=ddp.device)
    group = ddp.process_group
    work = dist.all_reduce(ranks, group=group, async_op=True)
    wait(work, group, lambda: "the agreement on whether this step is reduced (join)")
    return int(ranks.item())
