"""Buckets: the result is the same however gradients are put into them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import FEATURES, Net, batch, check, loss_of, plain_step, seeded, train
from replicas import both_kinds
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from towers import CAPS, LAYERS, LIMIT, WIDTH, Tower, collectives_by_step

from gradsync import DistributedDataParallel as DDP
from gradsync import StateError
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


@both_kinds
def test_the_result_is_bitwise_the_same_however_gradients_are_bucketed(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        reference = check(rank, world, Tower, steps=4)
        for caps, _ in CAPS:
            for more in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
                settings = caps | more | {"gradient_as_bucket_view": views}
                ours = train(DDP(seeded(Tower), **settings), lambda i: batch(i, rank), steps=4)
                ours.assert_equal(reference, bitwise=True, what=f"the defaults, with {settings}")

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_with_the_same_settings_torch_computes_the_same(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        for caps, _ in CAPS:
            for batched in (False, True):
                settings = caps | {"gradient_as_bucket_view": views, "batched_grad_copy": batched}
                check(rank, world, Tower, ddp=settings, against=["torch"])

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_gradients_may_arrive_in_another_order_on_another_rank_or_in_another_step(
    pool: WorkerPool, views: bool
) -> None:
    class Reordered(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.shift = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for index in range(LAYERS):
                x = torch.tanh(self.layers[(index + self.shift) % LAYERS](x))
            return x

    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            net = model.module
            net.shift = index + 2 * rank
            plain_step(model, x, index)

        for caps, _ in CAPS:
            settings = caps | {"gradient_as_bucket_view": views}
            check(rank, world, Reordered, step=step, ddp=settings, against=["torch"])

    pool.run(run, timeout=LIMIT)


@pytest.mark.parametrize("mib", [2, 8, 30])
def test_a_large_parameter_among_small_ones_is_reduced_as_by_torch(
    pool: WorkerPool, mib: int
) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 32 * mib)
            self.large = nn.Linear(32 * mib, 8192)
            self.last = nn.Linear(8192, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.large(torch.tanh(self.first(x)))))

    def run(rank: int, world: int) -> None:
        check(rank, world, Large)
        check(rank, world, Large, ddp={"gradient_as_bucket_view": True}, against=["torch"])
        check(rank, world, Large, ddp={"bucket_cap_mb": 1}, against=["torch"])
        ours, theirs = [collectives_by_step(cls(Large()), rank, 3)[-1] for cls in (DDP, TorchDDP)]
        assert ours == theirs == ["allreduce"] * 2

    pool.run(run, timeout=LIMIT)


@pytest.mark.parametrize("backend", ["gloo", "gradsync"])
@both_kinds
def test_parameters_without_elements_or_without_dimensions_have_their_place(
    pool: WorkerPool, views: bool, backend: str
) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(3, 0))

        def forward(self, x: Tensor) -> Tensor:
            nothing = self.empty.sum() + self.nothing.sum()
            return super().forward(x) * self.scale + nothing

    def run(rank: int, world: int) -> None:
        for caps in ({}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 1000}):
            for more in ({}, {"find_unused_parameters": True}):
                settings = caps | more | {"gradient_as_bucket_view": views}
                check(rank, world, Odd, ddp=settings, against=["single"])

    pool.run(run, timeout=LIMIT, backend=backend)


@both_kinds
def test_of_many_equal_layers_some_may_have_no_gradient_or_one_with_strides_of_its_own(
    pool: WorkerPool, views: bool
) -> None:
    class Skipping(Tower):
        skipped: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for index, layer in enumerate(self.layers):
                x = x if index in self.skipped else torch.tanh(layer(x))
            return x

    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            net = model.module
            net.skipped = () if index == 1 else (index, index + 1 + rank)
            net.layers[9].weight.grad = torch.full((WIDTH, WIDTH), 0.5 + rank).t()
            plain_step(model, x, index)

        settings = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        check(rank, world, Skipping, step=step, ddp=settings, against=["torch"], steps=4)

    pool.run(run, timeout=LIMIT)


class Row(nn.Module):
    """Many parameters of one shape."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(make()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        factors = [(1 + index) * p.square().sum() for index, p in enumerate(self.all)]
        return x * torch.stack(factors).sum() / 100


@both_kinds
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 1).t(),
        lambda: torch.randn(3, 4)[0:1, 0],
        lambda: torch.randn(10, 4)[::10],
        lambda: torch.randn(2, 3).t(),
    ],
    ids=["1x4", "1", "far", "transposed"],
)
def test_many_parameters_of_one_shape_may_have_any_strides(
    pool: WorkerPool, make: Callable[[], Tensor], views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, lambda: Row(make), ddp=settings, against=["single"], steps=3)

    pool.run(run, timeout=LIMIT)


def test_a_gradient_of_the_wrong_shape_among_many_is_named(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(Row(lambda: torch.randn(4)), gradient_as_bucket_view=True)
        plain_step(ddp, batch(0, rank), 0)

        def spoil(parameter: Tensor) -> None:
            parameter.grad.data = torch.full((8,), -1.0)

        ddp.module.all[3].register_post_accumulate_grad_hook(spoil)
        with pytest.raises(StateError, match=r"parameter all\.3 has shape \(8,\)"):
            plain_step(ddp, batch(1, rank), 1)

    pool.run(run, ranks=1, timeout=LIMIT)


def test_gradients_that_lie_in_the_bucket_by_another_name_stay_right(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach().zero_()
            loss_of(model(x)).backward()

        settings = {"gradient_as_bucket_view": True}
        make = lambda: Row(lambda: torch.randn(4))  # noqa: E731
        check(rank, world, make, ddp=settings, against=["single"], step=step, steps=4)

    pool.run(run, timeout=LIMIT)
