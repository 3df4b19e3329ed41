"""Delayed all-reduce: chosen parameters are reduced together when one gradient arrives.

Their gradients are views of one flat buffer. It is reduced by a backward in which the trigger
gets a gradient, with all that has gathered in it: over several backwards, if the trigger was
not in each of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from gradsync.ddp.autograd import EndOfBackward, GradientWatch, watch_outputs
from gradsync.ddp.bucket import view_like
from gradsync.ddp.collectives import all_reduce, wait
from gradsync.errors import ArgumentError


def check_delayed(
    named: Sequence[tuple[str, Parameter]] | None, trigger: Parameter | None, module: nn.Module
) -> None:
    """Raise ``ArgumentError`` unless both are given and are parameters of the module."""
    if (named is None) != (trigger is None):
        raise ArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time."
        )
    if named is None:
        return
    members = dict(module.named_parameters(remove_duplicate=False))
    for name, param in _pairs(named):
        if members.get(name) is not param:
            raise ArgumentError(
                f"delay_all_reduce_named_params: {name} is not the name of that parameter in the "
                "module. Take both from module.named_parameters()."
            )
    if not any(param is trigger for param in members.values()):
        raise ArgumentError("param_to_hook_all_reduce must be a parameter of the module.")
    if trigger is not None and not trigger.requires_grad:
        raise ArgumentError(
            "param_to_hook_all_reduce is frozen: it would never get the gradient that starts the "
            "reduction."
        )


def _pairs(named: object) -> Sequence[tuple[str, Parameter]]:
    try:
        return [(name, param) for name, param in named]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ArgumentError(
            "delay_all_reduce_named_params must be a list of (name, parameter), as from "
            f"module.named_parameters(), got {type(named).__name__}."
        ) from None


def all_names(delayed: Sequence[tuple[str, Parameter]], module: nn.Module) -> list[str]:
    """The names that delayed parameters have; one that is shared has several."""
    members = {id(param) for _, param in delayed}
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, param in named if id(param) in members]


class DelayedReduction:
    """Reduces ``parameters`` at the end of each backward in which ``trigger`` gets a gradient.

    At the end, and not at once: gradients may come after that of the trigger, and on all ranks
    this reduction has to have the same place among those of the buckets.
    """

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
        self.parameters = [param for param in dict.fromkeys(parameters) if param.requires_grad]
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
        self._is_due = False  # at the end of this backward
        self._sees_end = False
        self._watch: GradientWatch | None = GradientWatch(trigger, lambda *_: self._triggered())

    def remove(self) -> None:
        """Let go of the parameters."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def after_forward(self, outputs: object) -> None:
        """Let gradients gather in the buffer; those that were dropped begin at zero."""
        if not torch.is_grad_enabled():
            return
        for param, view in self._views.items():
            if param.grad is None:
                param.grad = view.zero_()
        watch_outputs(outputs, lambda _node: self._begin())

    def _begin(self) -> None:
        """A backward has come to the outputs. Should it raise, peers still wait for us."""
        self._is_due |= self._watch is not None and self._watch.will_fire()
        self._await_end()

    def _triggered(self) -> None:
        self._is_due = True
        self._await_end()

    def _await_end(self) -> None:
        if not self._sees_end:
            self._sees_end = True
            EndOfBackward.schedule(self._end, self._end)

    def _end(self) -> None:
        due, self._is_due, self._sees_end = self._is_due, False, False
        if due:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what has gathered."""
        for param, view in self._views.items():
            if param.grad is None:
                view.zero_()
            elif param.grad is not view:  # the program, or autograd, has replaced it
                view.copy_(param.grad)
        works = []
        for buffer in self._buffers:
            buffer.mul_(self._scale)
            works.append(all_reduce(self._group, buffer))
        for work in works:
            wait(work, self._group, lambda: "the delayed all-reduce", by_future=True)
        for param, view in self._views.items():
            if param.grad is None:
                param.grad = view
            elif param.grad is not view:
                param.grad.copy_(view)
