"""Ways to make a step: orders of forward and backward, exceptions, optimizers, world sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles import FEATURES, ROWS, Net, bare, batch, check, loss_of, seeded, sgd, train
from replicas import both_kinds
from step_ways import (
    AS_IN_ONE_PROCESS,
    a_gradient_of_the_input_beside,
    halves,
    one_output_fed_to_the_next_forward,
    two_forwards_one_backward,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


class Normed(nn.Module):
    """With buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


# ------------------------------------------------------------------ forwards and backwards


def a_graph_created_by_backward(model: nn.Module, x: Tensor, _index: int) -> None:
    loss_of(model(x)).backward(create_graph=True)


@both_kinds
@pytest.mark.parametrize("way", AS_IN_ONE_PROCESS, ids=lambda f: f.__name__)
def test_trains_as_one_process(
    pool: WorkerPool, way: Callable[[nn.Module, Tensor, int], None], views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        against = ["single"]
        if way in (two_forwards_one_backward, a_gradient_of_the_input_beside):
            against.append("torch")
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, Net, step=way, ddp=settings, against=against)
        for more in ({"find_unused_parameters": True}, {"bucket_cap_mb": 0}):
            check(rank, world, Net, step=way, ddp=settings | more, against=["single"])
        if way is not one_output_fed_to_the_next_forward:
            train(DDP(Normed(), **settings), lambda i: batch(i, rank), step=way)

    pool.run(run)


def test_a_graph_created_by_backward_does_not_disturb_the_reduction(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        # torch's own fails here: it writes into gradients that require grad.
        check(rank, world, Net, step=a_graph_created_by_backward, against=["single"])

    pool.run(run)


@both_kinds
def test_a_loss_on_gradients_alone_is_reduced_as_torch_does(pool: WorkerPool, views: bool) -> None:
    """As where forces are gradients of an energy: no backward passes through the output itself."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(FEATURES, 8, bias=False)
            self.outer = nn.Linear(8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.tanh(self.inner(x)))

    def penalty(model: nn.Module, x: Tensor, with_energy: bool) -> None:
        x = x.clone().requires_grad_()
        energy = model(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        (loss_of(force) + (loss_of(energy) if with_energy else 0)).backward()

    def run(rank: int, world: int) -> None:
        for with_energy in (True, False):

            def step(model: nn.Module, x: Tensor, _index: int, w: bool = with_energy) -> None:
                penalty(model, x, w)

            check(rank, world, Energy, step=step, ddp={"gradient_as_bucket_view": views})

    pool.run(run)


def test_outputs_changed_in_place_are_still_outputs_of_the_module(pool: WorkerPool) -> None:
    class Viewing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1)

    def one(model: nn.Module, x: Tensor, _index: int) -> None:
        output = model(x)
        output.mul_(2)
        loss_of(output).backward()

    def two(model: nn.Module, x: Tensor, _index: int) -> None:
        outputs = [model(half) for half in halves(x)]
        for output in outputs:
            output.mul_(2)
        for output in outputs:
            loss_of(output).backward()

    def run(rank: int, world: int) -> None:
        for make_model in (Net, Viewing):
            check(rank, world, make_model, step=one)
            check(rank, world, make_model, step=two, against=["single"])

    pool.run(run)


# ------------------------------------------------------------------ what is not reduced


def test_a_backward_through_the_bare_module_is_not_reduced(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for find_unused in (False, True):
            model = DDP(seeded(Net), find_unused_parameters=find_unused)
            loss_of(model(batch(0, rank))).backward()
            model.zero_grad()
            loss_of(model.module(batch(1, rank))).backward()
            alone = seeded(Net)
            loss_of(alone(batch(1, rank))).backward()
            for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, its.grad, rtol=0, atol=0)

    pool.run(run)


def test_autograd_grad_does_not_reduce_and_leaves_the_next_step_alone(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for settings in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            model = DDP(seeded(Net), **settings)
            alone = seeded(Net)
            x = batch(0, rank)
            ours = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
            its = torch.autograd.grad(loss_of(alone(x)), list(alone.parameters()))
            torch.testing.assert_close(ours, its, rtol=0, atol=0)
            assert all(p.grad is None for p in model.parameters())

            def step(model: nn.Module, x: Tensor, _index: int) -> None:
                output = model(x)
                torch.autograd.grad(loss_of(output), list(model.parameters()), retain_graph=True)
                loss_of(output).backward()

            check(rank, world, Net, step=step, ddp=settings, against=["single"])

    pool.run(run)


# ------------------------------------------------------------------ exceptions


class Boom(Exception):
    pass


class Explosive(Net):
    """Raises in forward, or in backward when the gradient has come half-way, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.explode_in = ""
        self.delay = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.explode_in == "forward":
            raise Boom
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        if self.explode_in == "backward" and hidden.requires_grad:
            hidden.register_hook(self._explode)
        return self.last(hidden)

    def _explode(self, _gradient: Tensor) -> None:
        time.sleep(self.delay)
        raise Boom


@both_kinds
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_on_all_ranks_training_goes_on(
    pool: WorkerPool, where: str, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for set_to_none in (True, False):

            def step(model: nn.Module, x: Tensor, index: int, to_none: bool = set_to_none) -> None:
                if index % 2:
                    net = bare(model)
                    net.explode_in = where
                    net.delay = 0.1 * dist.get_rank() if model is not net else 0.0
                    with pytest.raises(Boom):
                        loss_of(model(x)).backward()
                    net.explode_in = ""
                    model.zero_grad(set_to_none=to_none)
                loss_of(model(x)).backward()

            for settings in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
                check(
                    rank,
                    world,
                    Explosive,
                    step=step,
                    steps=4,
                    ddp=settings | {"gradient_as_bucket_view": views},
                    set_to_none=set_to_none,
                    against=["single"],
                )

    pool.run(run)


def test_an_exception_in_the_loss_before_the_module_is_reached_costs_nothing(
    pool: WorkerPool,
) -> None:
    def step(model: nn.Module, x: Tensor, index: int) -> None:
        output = model(x)
        if index % 2:
            bad = output * 1
            bad.register_hook(lambda _gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(bad).backward()
            output = model(x)
        loss_of(output).backward()

    def run(rank: int, world: int) -> None:
        check(rank, world, Net, step=step, steps=4, against=["single"])

    pool.run(run)


# ------------------------------------------------------------------ around the step


@both_kinds
@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_forms_of_zero_grad_of_module_and_optimizer(
    pool: WorkerPool, set_to_none: bool, views: bool
) -> None:
    def step(model: nn.Module, x: Tensor, index: int) -> None:
        if index % 2:
            model.zero_grad(set_to_none=set_to_none)
        loss_of(model(x)).backward()

    def run(rank: int, world: int) -> None:
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, Net, step=step, steps=5, ddp=settings, set_to_none=set_to_none)

    pool.run(run)


@both_kinds
def test_clipping_and_unscaling_in_place_work_on_the_averaged_gradients(
    pool: WorkerPool, views: bool
) -> None:
    def clip(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def clip_values(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def unscale(model: nn.Module, x: Tensor, _index: int) -> None:
        (loss_of(model(x)) * 1024).backward()
        found = torch.zeros(1)
        grads = [p.grad for p in model.parameters()]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor([1 / 1024]))
        assert not found

    def run(rank: int, world: int) -> None:
        for step in (clip, clip_values, unscale):
            check(rank, world, Net, step=step, ddp={"gradient_as_bucket_view": views})

    pool.run(run)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@both_kinds
@pytest.mark.parametrize("optimizer", [adam, foreach, fused], ids=lambda f: f.__name__)
def test_optimizers_make_the_same_weights(
    pool: WorkerPool, optimizer: Callable[[Any], torch.optim.Optimizer], views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, Net, ddp=settings, optimizer=optimizer, against=["torch"], steps=5)
        check(rank, world, Net, ddp=settings, optimizer=sgd, steps=5)

    pool.run(run)


@both_kinds
def test_lbfgs_with_several_backwards_a_step(pool: WorkerPool, views: bool) -> None:
    def lbfgs(model: nn.Module, x: Tensor) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return [p.detach() for p in model.parameters()]

    def run(rank: int, world: int) -> None:
        x = batch(0, 0)  # the same everywhere: LBFGS decides by the loss when it is done
        ours = lbfgs(DDP(seeded(Net), gradient_as_bucket_view=views), x)
        theirs = lbfgs(TorchDDP(seeded(Net), gradient_as_bucket_view=views), x)
        single = lbfgs(seeded(Net), x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours, single, rtol=1e-4, atol=1e-5)

    pool.run(run)


def test_a_wrapper_in_a_wrapper_averages_like_one(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for steps in (1, 4):
            nested = train(DDP(DDP(seeded(Net))), lambda i: batch(i, rank), steps=steps)
            flat = check(rank, world, Net, steps=steps)
            nested.assert_equal(flat, bitwise=True, what="one wrapper")

    pool.run(run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_second_run_with_the_same_seeds_is_bitwise_equal_to_the_first(
    pool: WorkerPool, ranks: int
) -> None:
    def run(rank: int, world: int) -> dict[str, Tensor]:
        histories = [
            train(DDP(seeded(Normed)), lambda i: batch(i, rank), steps=6, optimizer=adam)
            for _ in range(2)
        ]
        histories[0].assert_equal(histories[1], bitwise=True, what="the first run")
        return histories[0].weights[-1]

    first, second = pool.run(run, ranks=ranks), pool.run(run, ranks=ranks)
    for other in (*first[1:], *second):
        torch.testing.assert_close(first[0], other, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_world_sizes_train_as_one_process(pool: WorkerPool, ranks: int) -> None:
    def run(rank: int, world: int) -> None:
        for settings in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0}):
            check(rank, world, Net, ddp=settings)
        assert batch(0, rank).shape[0] == ROWS

    pool.run(run, ranks=ranks)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("backend", ["gloo", "gradsync"])
def test_the_default_device_does_not_matter(
    pool: WorkerPool, backend: str, options: dict[str, bool]
) -> None:
    def run(rank: int, world: int) -> None:
        group = dist.new_group(backend=backend)
        model = seeded(Normed)
        inputs = [batch(index, rank) for index in range(4)]
        with torch.device("meta"):
            ddp = DDP(model, process_group=group, **options)
            for x in inputs:
                ddp.zero_grad()
                loss_of(ddp(x)).backward()
        for parameter in model.parameters():
            others = [torch.empty_like(parameter) for _ in range(world)]
            dist.all_gather(others, parameter.grad)
            assert parameter.grad.abs().sum() > 0
            assert all(torch.equal(other, parameter.grad) for other in others)

    pool.run(run)
