"""A training run as data: what to build, feed and minimise, and the trace it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Wrap = Callable[[nn.Module], nn.Module]


def mse_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of ``model(*inputs)``; the batch's last tensor is the target.

    >>> mse_loss(nn.Identity(), (torch.ones(2), torch.zeros(2))).item()
    1.0
    """
    *inputs, target = batch
    return F.mse_loss(model(*inputs), target)


def sgd_with_momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: its momentum lets a wrong gradient of any step show at the end.

    >>> sgd_with_momentum([nn.Parameter(torch.ones(1))]).defaults["momentum"]
    0.9
    """
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run that can be repeated: the same on every wrapper and in one process.

    ``build`` and each step's forward pass run with fixed seeds, the latter its own for each
    rank. With ``same_init=False`` ranks start from different weights, and a wrapper has to
    hand out rank 0's. With ``accumulate=n`` a step is ``n`` batches, all but the last under
    ``no_sync()`` where the wrapper has it; batches are then numbered on, ``n`` a step.
    ``before_step`` gets the wrapped model.

    >>> Scenario(
    ...     build=lambda: nn.Linear(2, 1),
    ...     batch=lambda step, rank, world: (torch.ones(3, 2), torch.ones(3, 1)),
    ... ).steps
    4
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = mse_loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd_with_momentum
    steps: int = 4
    accumulate: int = 1
    seed: int = 0
    same_init: bool = True
    zero_grad_to_none: bool = True
    before_step: Callable[[nn.Module, int], None] | None = None


@dataclass
class Trace:
    """What a training run did: each step's loss and gradients, and what was left at the end.

    Names are those of the bare module. A gradient is None where ``.grad`` was.

    >>> Trace().state
    {}
    """

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Tensor]:
        """Final parameters and buffers."""
        return {**self.parameters, **self.buffers}


def train(scenario: Scenario, wrap: Wrap, rank: int, world: int) -> Trace:
    """Train as one rank of ``world``; ``wrap`` makes the module data-parallel.

    >>> scenario = Scenario(
    ...     build=lambda: nn.Linear(2, 1),
    ...     batch=lambda step, rank, world: (torch.ones(3, 2), torch.ones(3, 1)),
    ... )
    >>> len(train(scenario, wrap=lambda module: module, rank=0, world=1).losses)
    4
    """
    torch.manual_seed(scenario.seed + (0 if scenario.same_init else rank))
    module = scenario.build()
    model = wrap(module)
    optimizer = scenario.optimizer(model.parameters())
    trace = Trace()
    for step in range(scenario.steps):
        _begin_step(scenario, model, optimizer, step)
        loss = torch.zeros(())
        for number in _batches(scenario, step):
            last = number == (step + 1) * scenario.accumulate - 1
            with nullcontext() if last else _no_sync(model):
                _seed_batch(scenario, number, rank)
                part = scenario.loss(model, scenario.batch(number, rank, world))
                part.backward()
            loss = loss + part.detach()
        _record_step(trace, module, loss)
        optimizer.step()
    return _finish(trace, module)


def train_single(scenario: Scenario, world: int) -> Trace:
    """Train in one process on what ``world`` ranks would see: the mean of their losses.

    >>> scenario = Scenario(
    ...     build=lambda: nn.Linear(2, 1),
    ...     batch=lambda step, rank, world: (torch.ones(3, 2) * rank, torch.ones(3, 1)),
    ... )
    >>> sorted(train_single(scenario, world=2).state)
    ['bias', 'weight']
    """
    torch.manual_seed(scenario.seed)
    model = scenario.build()
    optimizer = scenario.optimizer(model.parameters())
    trace = Trace()
    for step in range(scenario.steps):
        _begin_step(scenario, model, optimizer, step)
        loss = torch.zeros(())
        for number in _batches(scenario, step):
            for rank in range(world):
                _seed_batch(scenario, number, rank)
                part = scenario.loss(model, scenario.batch(number, rank, world)) / world
                part.backward()
                loss = loss + part.detach()
        _record_step(trace, model, loss)
        optimizer.step()
    return _finish(trace, model)


def _begin_step(
    scenario: Scenario, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    optimizer.zero_grad(set_to_none=scenario.zero_grad_to_none)
    if scenario.before_step is not None:
        scenario.before_step(model, step)


def _batches(scenario: Scenario, step: int) -> range:
    return range(step * scenario.accumulate, (step + 1) * scenario.accumulate)


def _seed_batch(scenario: Scenario, number: int, rank: int) -> None:
    torch.manual_seed((scenario.seed + 1) * 1_000_003 + number * 1_009 + rank)


def _no_sync(model: nn.Module) -> AbstractContextManager[object]:
    no_sync = getattr(model, "no_sync", None)
    return nullcontext() if no_sync is None else no_sync()


def _record_step(trace: Trace, module: nn.Module, loss: Tensor) -> None:
    trace.losses.append(loss.clone())
    trace.grads.append(
        {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in module.named_parameters()
        }
    )


def _finish(trace: Trace, module: nn.Module) -> Trace:
    trace.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    trace.buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return trace
