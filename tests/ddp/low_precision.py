"""What the tests of mixed precision share: a model, and what its gradients have to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles import FEATURES, bare, batch, loss_of, sgd
from replicas import assert_equal_on_all_ranks
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync import MixedPrecision

LIMIT = {"timeout": 40.0, "group_timeout": 15.0}
LOW = (torch.bfloat16, torch.float16)

Step = Callable[[nn.Module, Tensor, int], None]

# How far a gradient may be from that of float32, as a part of its norm.
CLOSE = {torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Net(nn.Module):
    """Operations that save a parameter itself for the backward, and one that saves a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(FEATURES)
        self.scale = nn.Parameter(torch.full((FEATURES,), 0.9))
        self.last = nn.Linear(3 * FEATURES, 3)
        self.register_buffer("offset", torch.full((FEATURES,), 0.25))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(self.norm(x)[:, None]) + self.offset.to(x.dtype))
        return self.last((x * self.scale).flatten(1))


def bf16(**more: torch.dtype) -> MixedPrecision:
    return MixedPrecision(param_dtype=torch.bfloat16, **more)


def seeded(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return make()


def low_gradients(
    weights: dict[str, Tensor],
    config: MixedPrecision,
    step: int,
    world: int,
    way: Step | None = None,
) -> dict[str, Tensor]:
    """What the gradients must be, bitwise for two ranks: each rank's in the low dtype, averaged."""
    total: dict[str, Tensor] = {}
    reduced_in = config.reduce_dtype or config.param_dtype or torch.float32
    for rank in range(world):
        net = Net()
        net.load_state_dict(weights)
        net.to(config.param_dtype)
        if config.buffer_dtype is not None:
            net.offset = net.offset.to(config.buffer_dtype)
        (way or plain)(net, batch(step, rank).to(config.param_dtype), step)
        for name, param in net.named_parameters():
            assert param.grad is not None
            part = param.grad.to(reduced_in) * (1 / world)
            total[name] = part if rank == 0 else total[name] + part
    return {name: gradient.float() for name, gradient in total.items()}


def assert_full(ddp: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for name, param in bare(ddp).named_parameters():
        assert param.dtype == dtype, f"{name} is {param.dtype}"
        assert param.grad is None or param.grad.dtype == dtype, f"{name}.grad is {param.grad}"


def assert_close(mine: dict[str, Tensor], its: dict[str, Tensor], limit: float, hint: str) -> None:
    assert mine.keys() == its.keys(), hint
    for name, value in its.items():
        far = (mine[name] - value).norm() / value.norm().clamp(min=1e-3)
        assert far < limit, f"{hint}: {name} is {far:g} of its norm away"


def grads(model: nn.Module) -> dict[str, Tensor]:
    named = bare(model).named_parameters()
    return {n: p.grad.to_dense().clone() for n, p in named if p.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in bare(model).state_dict().items()}


def follow_float32(
    rank: int,
    world: int,
    step: Step,
    make: Callable[[], nn.Module] = Net,
    *,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 3,
    set_to_none: bool = True,
    hint: str = "",
    before: Callable[[DDP], object] = lambda ddp: None,
    **options: Any,
) -> DDP:
    """Train, and compare each gradient with that of one process in float32 at the same weights."""
    options.setdefault("mixed_precision", MixedPrecision(dtype, torch.float32))
    ddp = DDP(seeded(make), **options)
    before(ddp)
    optimizer = sgd(ddp.parameters())
    for index in range(steps):
        single = make()
        single.load_state_dict(weights_of(ddp))
        optimizer.zero_grad(set_to_none=set_to_none)
        step(ddp, batch(index, rank), index)
        step(single, torch.cat([batch(index, r) for r in range(world)]), index)
        where = f"{hint or step.__name__}, step {index}"
        assert_full(ddp)
        assert_close(grads(ddp), grads(single), CLOSE[dtype], where)
        assert_equal_on_all_ranks(grads(ddp).values())
        optimizer.step()
    return ddp


def plain(model: nn.Module, x: Tensor, _index: int) -> None:
    loss_of(model(x)).backward()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, ids: Tensor, embed: bool = True) -> Tensor:
        return self.last(self.embedding(ids) if embed else self.last.weight.repeat(2, 1))
