"""What the tests of hooks share: every hook, a model with all kinds of parameters, gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from gradsync import DistributedDataParallel as OurDDP
from gradsync import hooks

CLASSES = (TorchDDP, OurDDP)

MAKERS: dict[str, Callable[[], hooks.Hook]] = {
    "bf16": hooks.BF16,
    "fp16": hooks.FP16,
    "int8": lambda: hooks.Int8(block=64),
    "topk": lambda: hooks.TopK(ratio=0.25),
    "power_sgd": lambda: hooks.PowerSGD(rank=2, start_iteration=0),
    "power_sgd, started late": lambda: hooks.PowerSGD(rank=2, start_iteration=2),
    "power_sgd, cold start": lambda: hooks.PowerSGD(rank=4, start_iteration=0, warm_start=False),
}

# How far the mean of one step may be from the exact one, relative to its largest element.
BOUNDS = {"bf16": 2**-8, "fp16": 2**-10, "int8": 1 / 127}
FEEDBACK = ("int8", "topk", "power_sgd")
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}  # several of them, which are laid out anew


class Model(nn.Module):
    """Layers that repeat, a convolution in channels-last, a scalar and a parameter of nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.layers = nn.Sequential(*(nn.Linear(36, 36, dtype=dtype) for _ in range(4)))
        self.convolution = nn.Conv2d(4, 8, 3, padding=1, dtype=dtype)
        self.to(memory_format=torch.channels_last)
        self.last = nn.Linear(72, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.convolution(x.view(-1, 4, 3, 3)).flatten(1)
        return self.last(x * self.scale) + self.nothing.sum()


def inputs(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 36, generator=generator).to(dtype)


def exact_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The mean over the ranks in double precision, without any DDP."""
    gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    means = []
    for gradient in gradients:
        mean = gradient.double().contiguous()
        dist.all_reduce(mean)
        means.append(mean / dist.get_world_size())
    return means


def backward(ddp: nn.Module, x: Tensor) -> list[Tensor]:
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    return [p.grad.clone() for p in ddp.parameters()]


def equal_on_all_ranks(tensors: list[Tensor]) -> bool:
    """Bit by bit, NaN included."""
    flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])
    everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, flat)
    return all(torch.equal(flat, other) for other in everyones)
