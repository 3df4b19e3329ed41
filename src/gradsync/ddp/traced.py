"""Reduction that compiled autograd traces, so that forward and backward are one graph each.

It is asked for as with torch's class, by ``torch._dynamo.config.optimize_ddp = "python_reducer"``
when the DDP is made. There is no reducer then: each parameter averages its gradient with a
functional collective, and Inductor fuses those of a bucket. All that is here is traced by Dynamo,
so it keeps to what Dynamo knows. As in torch's class buffers are not synchronised, and all ranks
have to use the same parameters.
"""

import functools
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.utils.hooks import RemovableHandle

from gradsync.ddp.comm_hook import Hook
from gradsync.ddp.plan import MIB

if TYPE_CHECKING:
    from gradsync.ddp.replica import Replica


def is_asked_for() -> bool:
    """Is this the way that new DDPs have to reduce?"""
    from torch._dynamo.utils import get_optimize_ddp_mode

    return get_optimize_ddp_mode() == "python_reducer"


class TracedReduction:
    """Averages each gradient of ``ddp`` where it is accumulated, in place of the reducer."""

    def __init__(self, ddp: "Replica") -> None:
        self.hooks: list[tuple[Hook, object]] = []
        self._handles: list[RemovableHandle] = []
        _fuse_collectives(ddp.bucket_bytes_cap)
        group = ddp.process_group
        divisor = group.size() if ddp.reducer.options.mean else 1
        hook = functools.partial(_reduce, weakref.ref(ddp), self.hooks, group, divisor)
        for slot in ddp.reducer.slots:
            self._handles.append(slot.param.register_post_accumulate_grad_hook(hook))
        # Dynamo leaves the forward of the class alone: see [Note: Dynamo and our frames].
        ddp.forward = MethodType(_forward, ddp.module)

    def remove(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _forward(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    return module(*inputs, **kwargs)


def _reduce(
    ddp: "weakref.ref[Replica]",
    hooks: list[tuple[Hook, object]],
    group: dist.ProcessGroup,
    divisor: int,
    param: Tensor,
) -> None:
    wrapper = ddp()
    if wrapper is None or not wrapper.require_backward_grad_sync or param.grad is None:
        return
    if hooks:
        for hook, state in hooks:
            hook(state, (param.grad, param))
    else:
        # Inductor looks for these operations, in this order.
        param.grad.copy_(functional.all_reduce(param.grad / divisor, "sum", group))


def _fuse_collectives(bucket_bytes: int) -> None:
    from torch._inductor import config

    config._fuse_ddp_communication = True
    config._fuse_ddp_bucket_size = bucket_bytes // MIB
