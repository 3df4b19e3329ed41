"""no_sync: gradients add up on each rank, and the next step reduces all of them."""

from __future__ import annotations

import pytest
import torch
from oracles import FEATURES, Net, batch, check, loss_of, no_sync, seeded, train
from replicas import both_kinds
from step_ways import halves
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


@both_kinds
@pytest.mark.parametrize("micro_steps", [1, 2, 3])
def test_no_sync_accumulates_and_the_next_step_reduces_all(
    pool: WorkerPool, micro_steps: int, views: bool
) -> None:
    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        with no_sync(model):
            for k in range(micro_steps):
                loss_of(model(x + k)).backward()
        loss_of(model(x)).backward()

    def run(rank: int, world: int) -> None:
        settings = {"gradient_as_bucket_view": views}
        for more in ({}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0}):
            for set_to_none in (True, False):
                check(rank, world, Net, step=step, ddp=settings | more, set_to_none=set_to_none)

    pool.run(run)


@both_kinds
def test_within_no_sync_gradients_are_those_of_the_rank_alone(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        model = DDP(seeded(Net), gradient_as_bucket_view=views)
        alone = seeded(Net)
        for index in range(3):
            with model.no_sync():
                loss_of(model(batch(index, rank))).backward()
            loss_of(alone(batch(index, rank))).backward()
        for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, its.grad, rtol=0, atol=0)

    pool.run(run)


@both_kinds
def test_the_forward_decides_whether_its_backward_is_reduced(pool: WorkerPool, views: bool) -> None:
    def forward_inside(model: nn.Module, x: Tensor, _index: int) -> None:
        with no_sync(model):
            loss = loss_of(model(x))
        loss.backward()

    def backward_inside(model: nn.Module, x: Tensor, _index: int) -> None:
        loss = loss_of(model(x))
        with no_sync(model):
            loss.backward()

    def run(rank: int, world: int) -> None:
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, Net, step=backward_inside, ddp=settings)
        local = train(
            DDP(seeded(Net), **settings), lambda i: batch(i, rank), step=forward_inside, steps=1
        )
        alone = train(seeded(Net), lambda i: batch(i, rank), steps=1)
        local.assert_equal(alone, bitwise=True, what="this rank alone")
        oracle = train(
            TorchDDP(seeded(Net), **settings),
            lambda i: batch(i, rank),
            step=forward_inside,
            steps=1,
        )
        local.assert_equal(oracle, bitwise=True, what="torch's DDP")

    pool.run(run)


def test_a_no_sync_forward_between_does_not_take_the_reduction_from_an_earlier_one(
    pool: WorkerPool,
) -> None:
    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        synced, local = halves(x)
        loss = loss_of(model(synced))
        with no_sync(model):
            other = loss_of(model(local))
        other.backward()
        loss.backward()

    def run(rank: int, world: int) -> None:
        check(rank, world, Net, step=step, against=["single"])

    pool.run(run)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(FEATURES, 3)
        self.right = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


@both_kinds
@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_used_only_inside_no_sync_are_reduced_with_the_next_step(
    pool: WorkerPool, views: bool, set_to_none: bool
) -> None:
    def step(model: nn.Module, x: Tensor, index: int) -> None:
        branches = ["left", "right"] if index % 2 else ["right", "left"]
        with no_sync(model):
            loss_of(model(x, branches[0])).backward()
        loss_of(model(x, branches[1])).backward()

    def run(rank: int, world: int) -> None:
        check(
            rank,
            world,
            Branching,
            step=step,
            steps=5,
            ddp={"find_unused_parameters": True, "gradient_as_bucket_view": views},
            set_to_none=set_to_none,
            against=["single"],
        )

    pool.run(run)
