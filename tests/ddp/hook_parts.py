"""What the tests of communication hooks share: options, PowerSGD, a future, an average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles import batch as net_batch
from oracles import loss_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

LIMIT = 60.0
SMALL = {"bucket_cap_mb": 1e-4}  # about a bucket for each layer
Future = torch.futures.Future

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": SMALL,
    "views": {"gradient_as_bucket_view": True, **SMALL},
    "static": {"static_graph": True, **SMALL},
    "unused": {"find_unused_parameters": True, **SMALL},
}


def done(value: object) -> Future[Any]:
    future: Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def power_sgd(hook: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    start = options.pop("start_powerSGD_iter", 2)
    state = powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=start, min_compression_rate=1, **options
    )
    return state, hook


def average(module: nn.Module, world: int, step: int = 0) -> list[Tensor]:
    """The mean of all ranks' gradients of a Net, computed here alone."""
    module.zero_grad()
    for rank in range(world):
        (loss_of(module(net_batch(step, rank))) / world).backward()
    return [parameter.grad for parameter in module.parameters()]
