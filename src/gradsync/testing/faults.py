"""Faults on order: one rank fails at one step, in one phase, in one way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

Phase = Literal["forward", "backward", "optimizer"]
Action = Literal["raise", "kill", "stop", "nan"]


class InjectedFault(RuntimeError):
    """What a fault with ``action="raise"`` raises.

    >>> raise InjectedFault("rank 0, step 3, forward")
    Traceback (most recent call last):
    ...
    gradsync.testing.faults.InjectedFault: rank 0, step 3, forward
    """


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one rank: at which step, in which phase, and what happens.

    Steps count from 0: forward passes of the module, or optimizer steps for
    ``phase="optimizer"``. ``action`` is ``"raise"`` (`InjectedFault`), ``"kill"`` (SIGKILL
    to the process itself), ``"stop"`` (SIGSTOP) or ``"nan"``: the outputs, their gradient or the
    gradients that the optimizer is about to use become NaN.

    >>> model = nn.Linear(1, 1)
    >>> handle = Fault(rank=0, step=1, phase="forward", action="nan").install(model)
    >>> model(torch.ones(1)).isnan().item(), model(torch.ones(1)).isnan().item()
    (False, True)
    >>> handle.remove()
    """

    rank: int
    step: int
    phase: Phase = "forward"
    action: Action = "raise"

    def __post_init__(self) -> None:
        for name, choices in (("phase", get_args(Phase)), ("action", get_args(Action))):
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise ValueError(f"{name}={given!r} is not one of {', '.join(choices)}")

    def install(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> FaultHandle:
        """Arm the fault on this rank's ``module``; does nothing on other ranks."""
        if self.phase == "optimizer" and optimizer is None:
            raise ValueError("a fault in the optimizer phase needs install(module, optimizer)")
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        if own_rank != self.rank:
            return FaultHandle([])
        hooks = _Hooks(self)
        if self.phase == "optimizer":
            assert optimizer is not None
            return FaultHandle([optimizer.register_step_pre_hook(hooks.before_optimizer)])
        before = module.register_forward_pre_hook(hooks.before_forward)
        return FaultHandle([before, module.register_forward_hook(hooks.after_forward)])


@dataclass
class FaultHandle:
    """Removes an installed fault.

    >>> FaultHandle([]).remove()
    """

    handles: list[Any]

    def remove(self) -> None:
        """Disarm the fault; safe to call again."""
        while self.handles:
            self.handles.pop().remove()


@contextmanager
def fail_at(
    module: nn.Module,
    rank: int,
    step: int,
    phase: Phase = "forward",
    action: Action = "raise",
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[None]:
    """Arm a `Fault` on ``module`` for the ``with`` block.

    >>> model = nn.Linear(1, 1)
    >>> with fail_at(model, rank=0, step=0):
    ...     model(torch.ones(1))
    Traceback (most recent call last):
    ...
    gradsync.testing.faults.InjectedFault: injected at rank 0, step 0, forward
    """
    fault = Fault(rank=rank, step=step, phase=phase, action=action)
    handle = fault.install(module, optimizer)
    try:
        yield
    finally:
        handle.remove()


class _Hooks:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._step = -1

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self._step += 1
        if self._due("forward") and self._fault.action != "nan":
            self._strike()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._due("forward"):
            return _map_tensors(output, _to_nan)
        if self._due("backward"):
            _map_tensors(output, self._hook_gradient)
        return output

    def before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        if not self._due("optimizer"):
            return
        if self._fault.action != "nan":
            self._strike()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))

    def _hook_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._on_gradient)
        return tensor

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._fault.action != "nan":
            self._strike()
        return _to_nan(gradient)

    def _due(self, phase: Phase) -> bool:
        return self._fault.phase == phase and self._fault.step == self._step

    def _strike(self) -> None:
        fault = self._fault
        if fault.action == "raise":
            where = f"rank {fault.rank}, step {fault.step}, {fault.phase}"
            raise InjectedFault(f"injected at {where}")
        number = signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP
        os.kill(os.getpid(), number)


def _to_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * float("nan") if tensor.is_floating_point() else tensor


def _map_tensors(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_map_tensors(item, change) for item in value)
    return value
