"""Gradients as views of buckets, and all that a program may do with them between steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import Net, batch, check, loss_of, plain_step, seeded
from replicas import both_kinds
from torch import Tensor, nn
from towers import CAPS, LAYERS, LIMIT, Tower

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


def storages(model: nn.Module) -> set[int]:
    """The memory blocks that the gradients lie in."""
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is not None for grad in grads)
    return {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}


def test_with_views_the_gradients_of_one_bucket_share_memory_and_without_none_do(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, buckets in CAPS:
            for views, expected in ((True, buckets), (False, 2 * LAYERS)):
                for static in (False, True):
                    settings = caps | {"gradient_as_bucket_view": views, "static_graph": static}
                    model = DDP(seeded(Tower), **settings)
                    for index in range(3):
                        model.zero_grad()
                        plain_step(model, batch(index, rank), index)
                    assert len(storages(model)) == expected, settings

    pool.run(run, timeout=LIMIT)
    pool.run(run, timeout=LIMIT, ranks=1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_views_stay_in_the_same_memory_through_zero_grad(
    pool: WorkerPool, set_to_none: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for settings in ({}, {"bucket_cap_mb": 0.07}, {"find_unused_parameters": True}):
            model = DDP(seeded(Tower), gradient_as_bucket_view=True, **settings)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            places = []
            for index in range(5):
                zero_grad = model.zero_grad if index % 2 else optimizer.zero_grad
                zero_grad(set_to_none=set_to_none)
                grads = [p.grad for p in model.parameters() if p.requires_grad]
                if set_to_none:
                    assert grads == [None] * len(grads)
                elif index:
                    assert all(grad is not None and not grad.any() for grad in grads)
                plain_step(model, batch(index, rank), index)
                places.append(storages(model))
                optimizer.step()
            assert places[2] == places[3] == places[4], settings

    pool.run(run, timeout=LIMIT)


def nothing(_model: nn.Module) -> None:
    """Gradients of all steps add up."""


def set_to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def some_to_none(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None


def scaled_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def filled_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(0.25)


def replaced_by_new_tensors(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.125)


def some_replaced(model: nn.Module) -> None:
    for parameter in list(model.parameters())[1::2]:
        parameter.grad = torch.full_like(parameter, 0.125)


def replaced_by_clones(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def replaced_by_aliases(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


def replaced_by_other_strides(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.grad = torch.full_like(parameter.t(), 0.125).contiguous().t()


TREATMENTS = [
    nothing,
    set_to_zero,
    some_to_none,
    scaled_in_place,
    filled_in_place,
    replaced_by_new_tensors,
    some_replaced,
    replaced_by_clones,
    replaced_by_aliases,
    replaced_by_other_strides,
]


@both_kinds
@pytest.mark.parametrize("treat", TREATMENTS, ids=lambda f: f.__name__)
def test_a_program_may_do_with_gradients_between_steps_as_without_ddp(
    pool: WorkerPool, treat: Callable[[nn.Module], None], views: bool
) -> None:
    def adding_up(model: nn.Module, batch_of: Callable[[int], Tensor]) -> list[Tensor]:
        """Gradients after each step; only what ``treat`` does is done between."""
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        seen = []
        for index in range(5):
            plain_step(model, batch_of(index), index)
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            treat(model)
        return seen

    def run(rank: int, world: int) -> None:
        def own(index: int) -> Tensor:
            return batch(index, rank)

        def joined(index: int) -> Tensor:
            return torch.cat([batch(index, each) for each in range(world)])

        single = adding_up(seeded(Net), joined)
        kinds = ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}, {"static_graph": True})
        for more in kinds:
            settings = {"gradient_as_bucket_view": views} | more
            ours = adding_up(DDP(seeded(Net), **settings), own)
            torch.testing.assert_close(ours, single, rtol=1e-5, atol=1e-6)

    pool.run(run, timeout=LIMIT)
    pool.run(run, timeout=LIMIT, ranks=1)


@pytest.mark.parametrize(
    "treat", [nothing, set_to_zero, scaled_in_place, filled_in_place], ids=lambda f: f.__name__
)
def test_views_that_are_changed_in_place_or_added_to_give_torchs_result(
    pool: WorkerPool, treat: Callable[[nn.Module], None]
) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            for half in (x[::2], x[1::2]):
                treat(model)
                plain_step(model, half, index)

        for views in (False, True):
            settings = {"gradient_as_bucket_view": views}
            check(rank, world, Net, step=step, ddp=settings, set_to_none=False)

    pool.run(run, timeout=LIMIT)


def test_replaced_gradients_are_views_again_after_the_next_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for treat in TREATMENTS:
            model = DDP(seeded(Net), gradient_as_bucket_view=True)
            for index in range(4):
                plain_step(model, batch(index, rank), index)
                if index < 3:
                    treat(model)
            assert len(storages(model)) == 1, treat.__name__

    pool.run(run, timeout=LIMIT)


def test_the_optimizer_may_replace_gradients_by_others_after_the_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            loss_of(model(x)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.sign()

        for views in (False, True):
            for set_to_none in (False, True):
                settings = {"gradient_as_bucket_view": views}
                check(rank, world, Net, step=step, ddp=settings, set_to_none=set_to_none)

    pool.run(run, timeout=LIMIT)
