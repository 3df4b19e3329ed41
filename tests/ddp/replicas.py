"""What several test files need: both classes, both kinds, small models, gradients, a count."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import gradsync
from gradsync import DistributedDataParallel as OurDDP

assert TorchDDP is not OurDDP

CLASSES = (TorchDDP, OurDDP)

# Of gradients: their own memory, or that of the buckets.
both_kinds = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])

Gradients = dict[str, Tensor | None]


class Branches(nn.Module):
    """A stem, and branches of which each call names those it uses."""

    def __init__(self, branches: int = 2, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Linear(width, width)
        self.branch = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))

    def forward(self, x: Tensor, *use: int) -> Tensor:
        x = self.stem(x)
        for index in use:
            x = x + self.branch[index](x)
        return x


def small() -> nn.Module:
    return nn.Linear(4, 2)


def frozen() -> nn.Module:
    return small().requires_grad_(False)


def mixed_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def batch(rank: int, step: int = 0, rows: int = 3, width: int = 4) -> Tensor:
    """The same for the same rank and step, different for others."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator)


def gradients(module: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(left: Gradients, right: Gradients, hint: object = "") -> None:
    """Bitwise: the same names, the same ones None, the same values."""
    assert left.keys() == right.keys(), hint
    for name, a in left.items():
        b = right[name]
        assert (a is None) == (b is None), f"{hint} {name}: {a} and {b}"
        if a is not None and b is not None:
            assert a.layout == b.layout, f"{hint} {name}: {a.layout} and {b.layout}"
            a, b = (t.to_dense() if t.is_sparse else t for t in (a, b))
            assert torch.equal(a, b), f"{hint} {name}: {a} and {b}"


def assert_equal_on_all_ranks(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None):
    for tensor in tensors:
        dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach().contiguous()
        all_of_them = [torch.empty_like(dense) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of_them, dense, group=group)
        assert all(torch.equal(dense, other) for other in all_of_them)


class Count:
    """Collectives issued on a gloo group, by its own sequence number."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group or dist.group.WORLD
        self._start = self._now()

    def _now(self) -> int:
        assert self._group is not None
        return self._group._get_sequence_number_for_group()

    def __call__(self) -> int:
        """How many since the last call, or since construction."""
        start, self._start = self._start, self._now()
        return self._start - start


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def caught(call: Callable[[], object], kind: type[BaseException] = Exception) -> BaseException:
    """The exception that ``call`` raises; it must raise one."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"nothing was raised, {kind.__name__} was expected")


def limit_time(group: dist.ProcessGroup, seconds: float) -> None:
    """For collectives from now on; what came before had the time that a busy machine takes."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


__all__ = [
    "CLASSES",
    "Branches",
    "Count",
    "OurDDP",
    "TorchDDP",
    "assert_equal_on_all_ranks",
    "assert_same",
    "batch",
    "both_kinds",
    "caught",
    "frozen",
    "gradients",
    "gradsync",
    "limit_time",
    "mixed_devices",
    "quiet",
    "small",
    "weights",
]
