"""Kinds of parameters: whatever a module is made of trains as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import FEATURES, Net, bare, check, loss_of
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


class SeveralDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(FEATURES, 5)
        self.wide = nn.Linear(5, 4, dtype=torch.float64)
        self.narrow = nn.Linear(4, 3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(self.single(x).double()).bfloat16())


class ChannelsLastAndContiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.contiguous = nn.Conv2d(4, 5, 2)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.contiguous(torch.tanh(self.last(x))).mean((2, 3)))


class Shared(nn.Module):
    """One tensor under two names, and one layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES)
        self.decode = nn.Linear(FEATURES, FEATURES)
        self.decode.weight = self.encode.weight
        self.again = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.decode(torch.tanh(self.encode(x)))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.last.bias.requires_grad_(False)


class Loose(nn.Module):
    """Parameters of unusual shapes, all of which take part in the output."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean(1)
        terms = [torch.outer(scale.to(p.dtype), p.flatten()) for p in self.parameters()]
        return torch.cat(terms, 1)


def zero_size() -> nn.Module:
    return Loose(empty=torch.empty(0), a=torch.randn(3), flat=torch.empty(4, 0), b=torch.randn(2))


def scalars() -> nn.Module:
    return Loose(scale=torch.randn(()), shift=torch.randn(()), vector=torch.randn(3))


def complex_numbers() -> nn.Module:
    return Loose(
        c=torch.randn(3, 2, dtype=torch.complex64),
        z=torch.randn(4, dtype=torch.complex128),
        real=torch.randn(3),
    )


def only_complex() -> nn.Module:
    return Loose(c=torch.randn(3, 2, dtype=torch.complex64))


def not_contiguous() -> nn.Module:
    return Loose(
        transposed=torch.randn(3, 4).t(),
        permuted=torch.randn(2, 3, 4).permute(1, 2, 0),
        gaps=torch.randn(4, 6)[:, ::2],
        plain=torch.randn(2, 2),
    )


def large_and_small() -> nn.Module:
    return Loose(a=torch.randn(2), big=torch.randn(300, 400), b=torch.randn(3), c=torch.randn(()))


MODELS: list[Callable[[], nn.Module]] = [
    SeveralDtypes,
    Shared,
    Frozen,
    zero_size,
    scalars,
    complex_numbers,
    only_complex,
    not_contiguous,
    large_and_small,
]


@pytest.mark.parametrize("make_model", MODELS, ids=lambda f: f.__name__)
def test_trains_as_torch_and_as_one_process_with_copies_and_with_views(
    pool: WorkerPool, make_model: Callable[[], nn.Module]
) -> None:
    def run(rank: int, world: int) -> None:
        check(rank, world, make_model)
        check(rank, world, make_model, ddp={"gradient_as_bucket_view": True})
        check(rank, world, make_model, ddp={"bucket_cap_mb": 0.00001}, against=["torch"])

    pool.run(run)


@pytest.mark.parametrize("views", [False, True])
def test_memory_formats_stay_side_by_side_and_gradients_have_the_strides_of_parameters(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            loss_of(model(x)).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert parameter.grad.stride() == parameter.stride(), name

        check(
            rank,
            world,
            ChannelsLastAndContiguous,
            step=step,
            features=(3, 5, 5),
            ddp={"gradient_as_bucket_view": views},
        )

    pool.run(run)


@pytest.mark.parametrize("views", [False, True])
def test_dense_strides_are_kept_and_gaps_are_closed(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> dict[str, tuple[int, ...]]:
        model = DDP(not_contiguous(), gradient_as_bucket_view=views)
        for _ in range(3):
            loss_of(model(torch.randn(4, FEATURES))).backward()
        return {name: p.grad.stride() for name, p in model.module.named_parameters()}

    expected = {"transposed": (1, 4), "permuted": (4, 1, 12), "gaps": (3, 1), "plain": (2, 1)}
    assert pool.run(run) == [expected] * 2


def test_more_ranks_than_elements(pool: WorkerPool) -> None:
    def one_element_each() -> nn.Module:
        return Loose(a=torch.randn(1), b=torch.randn(()), c=torch.randn(1, 1))

    def run(rank: int, world: int) -> None:
        for settings in ({}, {"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}):
            check(rank, world, one_element_each, ddp=settings)

    pool.run(run, ranks=4)


def freeze_except(model: nn.Module, names: set[str]) -> None:
    for name, parameter in bare(model).named_parameters():
        parameter.requires_grad_(name.partition(".")[0] in names)


SCHEDULES = {
    "frozen_and_unfrozen_again": [
        {"first", "second", "last"},
        {"second", "last"},
        {"second", "last"},
        {"last"},
        {"first", "last"},
        {"first", "second", "last"},
        {"first", "second", "last"},
    ],
    "one_layer_at_a_time": [{"last"}, {"second"}, {"first"}, {"second", "first"}, {"last"}],
}


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "find_unused"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_frozen_and_unfrozen_between_steps_train_as_in_one_process(
    pool: WorkerPool, schedule: str, find_unused: bool, views: bool
) -> None:
    plan = SCHEDULES[schedule]

    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            freeze_except(model, plan[index])
            loss_of(model(x)).backward()

        settings = {"find_unused_parameters": find_unused, "gradient_as_bucket_view": views}
        for caps in ({}, {"bucket_cap_mb": 0}):
            for set_to_none in (True, False):
                check(
                    rank,
                    world,
                    Net,
                    step=step,
                    steps=len(plan),
                    ddp=settings | caps,
                    set_to_none=set_to_none,
                    against=["single"],
                )

    pool.run(run)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_parameters_frozen_at_construction_train_as_in_one_process_once_unfrozen(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            if index == 2:
                bare(model).first.weight.requires_grad_(True)
            if index == 4:
                bare(model).requires_grad_(True)
                bare(model).second.weight.requires_grad_(False)
            loss_of(model(x)).backward()

        for set_to_none in (True, False):
            check(
                rank,
                world,
                Frozen,
                step=step,
                steps=7,
                ddp={"gradient_as_bucket_view": views},
                set_to_none=set_to_none,
                against=["single"],
            )

    pool.run(run)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_the_gradient_of_a_frozen_parameter_is_left_as_it_is(pool: WorkerPool, views: bool) -> None:
    """It is the program's: kept for later, or set by hand and different on each rank."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(1)
        model = DDP(Net(), gradient_as_bucket_view=views)
        x = torch.randn(4, FEATURES)
        loss_of(model(x)).backward()
        frozen = model.module.second.weight
        frozen.requires_grad_(False)
        with torch.no_grad():
            frozen.grad.mul_(rank + 1)
        kept = frozen.grad.clone()
        for _ in range(4):
            loss_of(model(x)).backward()
            torch.testing.assert_close(frozen.grad, kept, rtol=0, atol=0)

    pool.run(run, ranks=3)
