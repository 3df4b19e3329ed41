"""The communication hooks that race, each of ours beside the one of torch's that it replaces.

torch has no int8 hook; ours races against bfloat16, the smallest that torch sends without loss of
rank. torch's own bfloat16 hook refuses to be registered without NCCL, by its name: here it has
another. PowerSGD starts after two steps, which is the earliest that torch's allows.

torch's PowerSGD starts collectives from callbacks. On gloo these run in another order on each
rank, and with more than one bucket the ranks then read each other's wrong messages and abort. So
its contenders have one bucket, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from gradsync import hooks

Registered = Callable[[], tuple[object, Any]]  # makes a state and a hook


@dataclass(frozen=True, kw_only=True)
class Pair:
    name: str
    ours: Registered
    torch_name: str  # the rival's; several may share it
    torchs: Registered | None = None
    torch_options: dict[str, Any] = field(default_factory=dict)


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(None, bucket)


# torch compares annotations with types, and the ones above are strings.
bf16.__annotations__ = {}


def torch_power_sgd(rank: int) -> Registered:
    def make() -> tuple[object, Any]:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        return state, powerSGD_hook.powerSGD_hook

    return make


def power_sgd(rank: int) -> Registered:
    return lambda: (None, hooks.PowerSGD(rank, start_iteration=2))


ONE_BUCKET = {"bucket_cap_mb": 4096}

HOOKS = (
    Pair(
        name="bf16",
        ours=lambda: (None, hooks.BF16()),
        torch_name="bf16",
        torchs=lambda: (None, bf16),
    ),
    Pair(name="int8", ours=lambda: (None, hooks.Int8()), torch_name="bf16"),
    Pair(
        name="power-sgd-1",
        ours=power_sgd(1),
        torch_name="power-sgd-1",
        torchs=torch_power_sgd(1),
        torch_options=ONE_BUCKET,
    ),
    Pair(
        name="power-sgd-4",
        ours=power_sgd(4),
        torch_name="power-sgd-4",
        torchs=torch_power_sgd(4),
        torch_options=ONE_BUCKET,
    ),
)
