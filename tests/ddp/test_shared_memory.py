"""Gradients and parameters that two parties hold: they are never scaled or reduced twice."""

from __future__ import annotations

import copy

import pytest
import torch
from replicas import CLASSES, OurDDP, assert_equal_on_all_ranks, assert_same, caught, gradients
from torch import Tensor, nn

from gradsync import StateError
from gradsync.testing import WorkerPool

LIMIT = 60.0
SIDE = 1400  # 7.5 MiB: large enough to be reduced in place


class Sum(nn.Module):
    """Two parameters to which autograd gives gradients on the same memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Parameter(torch.ones(SIDE, SIDE))
        self.b = nn.Parameter(torch.ones(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "apart":
            return (self.a * x).sum() + (self.b * x * 2).sum()
        if self.kind == "transposed":
            return ((self.a.t() + self.b.t()) * x).sum()
        return ((self.a.view(-1) + self.b.view(-1)) * x).sum()


@pytest.mark.parametrize("backend", ["gloo", "gradsync"])
@pytest.mark.parametrize("views", [False, True])
def test_gradients_on_the_same_memory_are_those_of_torch(
    pool: WorkerPool, views: bool, backend: str
) -> None:
    def run(rank: int, world: int) -> None:
        for kind in ("transposed", "flat", "apart"):
            models = [cls(Sum(kind), gradient_as_bucket_view=views) for cls in CLASSES]
            for step in range(3):
                for ddp in models:
                    ddp.zero_grad()
                    ddp(torch.full((1,), rank + step + 1.0)).backward()
                assert_same(*map(gradients, models), hint=(kind, step))

    pool.run(run, timeout=LIMIT, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "gradsync"])
def test_gradients_that_begin_to_share_memory_are_an_error_and_no_wrong_sum(
    pool: WorkerPool, backend: str
) -> None:
    def run(rank: int, world: int) -> str:
        ddp = OurDDP(Sum("apart"))
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1)).backward()
        ddp.module.kind = "flat"
        ddp.zero_grad()
        return str(caught(lambda: ddp(torch.ones(1)).backward(), StateError))

    for text in pool.run(run, timeout=LIMIT, backend=backend):
        assert "share memory" in text
        assert "a" in text
        assert "b" in text


@pytest.mark.parametrize("views", [False, True])
def test_a_parameter_in_two_wrappers_gets_the_average_once(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> Tensor:
        shared = nn.Linear(3, 3, bias=False)
        nn.init.ones_(shared.weight)
        one = OurDDP(nn.Sequential(shared), gradient_as_bucket_view=views)
        two = OurDDP(nn.Sequential(shared), gradient_as_bucket_view=views)
        for _ in range(3):
            shared.weight.grad = None
            x = torch.full((1, 3), rank + 1.0)
            (one(x) + two(x)).sum().backward()
        return shared.weight.grad

    for grad in pool.run(run, timeout=LIMIT):
        assert torch.equal(grad, torch.full((3, 3), 3.0))


@pytest.mark.parametrize("views", [False, True])
def test_outputs_may_have_one_backward_each(pool: WorkerPool, views: bool) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.actor(x), self.critic(x)

    def run(rank: int, world: int) -> None:
        models = [cls(Towers(), gradient_as_bucket_view=views) for cls in CLASSES]
        for step in range(4):
            x = torch.full((2, 4), rank + step + 1.0)
            for ddp in models:
                ddp.zero_grad()
                actions, value = ddp(x)
                actions.sum().backward()
                value.sum().backward()
            assert_same(*map(gradients, models), hint=step)

    pool.run(run, timeout=LIMIT)


def test_a_change_of_dtype_after_wrapping_keeps_the_reduction(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> Tensor:
        ddp = OurDDP(nn.Linear(2, 2, bias=False))
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.double()
        ddp.zero_grad()
        ddp(torch.full((1, 2), rank + 1.0, dtype=torch.float64)).sum().backward()
        assert_equal_on_all_ranks(ddp.parameters())
        return ddp.module.weight.grad

    for grad in pool.run(run, timeout=LIMIT):
        assert torch.equal(grad, torch.full((2, 2), 1.5, dtype=torch.float64))


def test_what_was_accumulated_under_no_sync_survives_an_unfreeze(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        model.forward = lambda x, which: sum(model[i](x) for i in which)
        model[2].requires_grad_(False)
        ddp = OurDDP(model, find_unused_parameters=True)
        x = torch.full((1, 2), rank + 1.0)
        with ddp.no_sync():
            ddp(x, (0, 1)).sum().backward()
        model[2].requires_grad_(True)
        ddp(x, (0, 2)).sum().backward()
        return [each.weight.grad for each in model]

    first, second = pool.run(run, timeout=LIMIT)
    for a, b, expected in zip(first, second, (3.0, 1.5, 1.5), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, torch.full((2, 2), expected))


def test_a_frozen_view_keeps_its_value(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> bool:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        ddp = OurDDP(model, gradient_as_bucket_view=True)
        ddp(torch.ones(1, 3)).square().sum().backward()
        kept = copy.deepcopy(model[0].weight.grad)
        model[0].requires_grad_(False)
        for _ in range(3):
            model[1].zero_grad()
            ddp(torch.ones(1, 3)).square().sum().backward()
        return torch.equal(model[0].weight.grad, kept)

    assert pool.run(run, timeout=LIMIT) == [True, True]
