"""Delayed all-reduce: chosen parameters are reduced together when one gradient arrives.

Their gradients are views of one flat buffer. When the gradient of the trigger has been
accumulated, the buffer is reduced, with all that has gathered in it: over several backwards, if
the trigger was not in each of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gradsync.ddp.autograd import EndOfBackward, GradientWatch
from gradsync.ddp.bucket import view_like
from gradsync.ddp.collectives import Work, all_reduce, wait
from gradsync.errors import ArgumentError


def check_delayed(
    named: Sequence[tuple[str, Parameter]] | None,
    trigger: Parameter | None,
    known: Sequence[Parameter],
) -> None:
    """Raise ``ArgumentError`` unless both are given and are parameters of the module."""
    if (named is None) != (trigger is None):
        raise ArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time."
        )
    if named is None:
        return
    members = {id(param) for param in known}
    for entry in named:
        try:
            name, param = entry
        except (TypeError, ValueError):
            raise ArgumentError(
                "delay_all_reduce_named_params must be a list of (name, parameter), as from "
                f"module.named_parameters(); it has {type(entry).__name__}."
            ) from None
        if id(param) not in members:
            raise ArgumentError(
                f"delay_all_reduce_named_params: {name} is not a parameter of the module."
            )
    if id(trigger) not in members:
        raise ArgumentError("param_to_hook_all_reduce must be a parameter of the module.")


class DelayedReduction:
    """Reduces ``parameters`` when ``trigger`` gets its gradient."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[Parameter],
        trigger: Parameter,
        *,
        mean: bool,
    ) -> None:
        self._group = group
        self._scale = 1.0 / group.size() if mean else 1.0
        self.parameters = [param for param in parameters if param.requires_grad]
        self._buffers: list[Tensor] = []
        self._views: dict[Parameter, Tensor] = {}
        kinds = {(param.dtype, param.device) for param in self.parameters}
        for dtype, device in sorted(kinds, key=str):
            members = [p for p in self.parameters if (p.dtype, p.device) == (dtype, device)]
            buffer = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
            offset = 0
            for param in members:
                self._views[param] = view_like(param, buffer, offset)
                offset += param.numel()
            self._buffers.append(buffer)
        self._arrived: set[Parameter] = set()
        self._works: list[Work] = []
        self._watches = [
            GradientWatch(param, lambda *_, param=param: self._arrived.add(param))
            for param in self.parameters
        ]
        self._watches.append(GradientWatch(trigger, lambda *_: self._triggered()))

    def remove(self) -> None:
        """Let go of the parameters."""
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def after_forward(self) -> None:
        """Let gradients gather in the buffer; those that were dropped begin at zero."""
        for param, view in self._views.items():
            if param.grad is None:
                param.grad = view.zero_()

    def _triggered(self) -> None:
        EndOfBackward.schedule(self._finish, self._finish)
        if len(self._arrived) == len(self.parameters):
            self._start()

    def _start(self) -> None:
        with torch.no_grad():
            for param, view in self._views.items():
                if param.grad is None:
                    view.zero_()
                elif param.grad is not view:  # the program, or autograd, has replaced it
                    view.copy_(param.grad)
            for buffer in self._buffers:
                buffer.mul_(self._scale)
                self._works.append(all_reduce(self._group, buffer))

    def _finish(self) -> None:
        """The backward ends: the reduction has to be over by then."""
        if not self._works:
            self._start()  # some gradients came after the trigger, or not at all
        try:
            for work in self._works:
                wait(work, self._group, lambda: "the delayed all-reduce")
        finally:
            self._works = []
            self._arrived.clear()
        with torch.no_grad():
            for param, view in self._views.items():
                if param.grad is not None and param.grad is not view:
                    param.grad.copy_(view)
