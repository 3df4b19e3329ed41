"""Activation checkpoints inside the wrapped module and around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles import FEATURES, batch, check, loss_of, plain_step, seeded, train
from replicas import both_kinds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)

LIMIT = 50.0
SAID_BY_TORCH = "Expected to mark a variable ready only once"

both_ways = pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])


class Checkpointed(nn.Module):
    """The middle layer runs ``times`` times, each time in a checkpoint."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.times = times
        self.first = nn.Linear(FEATURES, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


class Unused(Checkpointed):
    """One layer in the checkpoint and one outside that nothing uses."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__(reentrant, times)
        self.unused = nn.Linear(4, 4)
        self.middle.spare = nn.Identity()
        self.middle.spare.unused = nn.Parameter(torch.ones(2))


class Sharing(Checkpointed):
    """Two layers in two checkpoints have the same weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.middle[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (self.middle, self.twin):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


class Deep(nn.Module):
    """Layers in checkpoints of their own, the first excepted; ``wrap`` makes the output."""

    def __init__(self, reentrant: bool, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.wrap = wrap
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(5))

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.wrap(x)


# ------------------------------------------------------------------ inside the module


@both_kinds
@both_ways
def test_a_checkpoint_over_a_layer_trains_as_torch_and_as_one_process(
    pool: WorkerPool, reentrant: bool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"static_graph": True}):
            settings = {"gradient_as_bucket_view": views} | more
            check(rank, world, lambda: Checkpointed(reentrant), ddp=settings, steps=4)

    pool.run(run, timeout=LIMIT)


@both_kinds
@both_ways
def test_repeated_checkpoints_over_one_layer_train_as_torch_where_the_graph_is_static(
    pool: WorkerPool, reentrant: bool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for times in (2, 3):
            for more in ({}, {"bucket_cap_mb": 0}):
                settings = {"gradient_as_bucket_view": views, "static_graph": True} | more
                check(rank, world, lambda t=times: Checkpointed(reentrant, t), ddp=settings)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_repeated_checkpoints_that_are_not_reentrant_need_no_promise(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            check(rank, world, lambda: Checkpointed(False, 3), ddp=settings)

    pool.run(run, timeout=LIMIT)


@both_kinds
@both_ways
def test_weights_shared_between_checkpoints(pool: WorkerPool, reentrant: bool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        for static in (True,) if reentrant else (True, False):
            settings = {"gradient_as_bucket_view": views, "static_graph": static}
            check(rank, world, lambda: Sharing(reentrant), ddp=settings)

    pool.run(run, timeout=LIMIT)


@both_kinds
@both_ways
def test_unused_parameters_beside_and_inside_a_checkpoint(
    pool: WorkerPool, reentrant: bool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for times in (1, 2):
            settings = {"gradient_as_bucket_view": views, "static_graph": True}
            check(rank, world, lambda t=times: Unused(reentrant, t), ddp=settings)
        settings = {"gradient_as_bucket_view": views, "find_unused_parameters": True}
        for caps in ({}, {"bucket_cap_mb": 0}):
            # torch's search does not see into a reentrant checkpoint, and fails.
            against = ["single"] if reentrant else ["torch", "single"]
            check(rank, world, lambda: Unused(reentrant), ddp=settings | caps, against=against)

    pool.run(run, timeout=LIMIT)


@both_ways
def test_a_step_with_checkpoints_costs_no_more_collectives(
    pool: WorkerPool, reentrant: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for settings in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            model = DDP(seeded(lambda: Checkpointed(reentrant)), bucket_cap_mb=0, **settings)
            with count_collectives() as counted:
                for index in range(3):
                    counted.clear()
                    plain_step(model, batch(index, rank), index)
            assert counted.by_op == {"allreduce": 6}, settings

    pool.run(run, timeout=LIMIT)


@both_ways
def test_random_numbers_and_statistics_in_a_checkpoint_are_torchs(
    pool: WorkerPool, reentrant: bool
) -> None:
    class Noisy(Checkpointed):
        def __init__(self) -> None:
            super().__init__(reentrant)
            self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        torch.manual_seed(10 * index + dist.get_rank())
        plain_step(model, x, index)

    def run(rank: int, world: int) -> None:
        for settings in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
            check(rank, world, Noisy, step=step, ddp=settings, against=["torch"], steps=4)

    pool.run(run, timeout=LIMIT)


# ------------------------------------------------------------------ ready twice


@both_kinds
@pytest.mark.parametrize("make", [lambda: Checkpointed(True, 2), lambda: Sharing(True)])
def test_two_reentrant_checkpoints_over_a_parameter_are_an_error_that_names_it_on_every_rank(
    pool: WorkerPool, make: Callable[[], nn.Module], views: bool
) -> None:
    def run(rank: int, world: int) -> list[str]:
        texts = []
        for more in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
            model = DDP(seeded(make), gradient_as_bucket_view=views, **more)
            for index in range(2):  # nor does it hang the next time
                with pytest.raises(RuntimeError, match=SAID_BY_TORCH) as caught:
                    plain_step(model, batch(index, rank), index)
                texts.append(str(caught.value))
                model.zero_grad()
        return texts

    for rank, texts in enumerate(pool.run(run, timeout=30)):
        for text in texts:
            assert "middle.0." in text
            assert f"rank {rank}" in text
            assert "static_graph=True" in text


@both_kinds
def test_after_that_error_training_goes_on_without_the_second_checkpoint(
    pool: WorkerPool, views: bool
) -> None:
    def step(model: nn.Module, x: Tensor, index: int) -> None:
        if isinstance(model, DDP) and index in (0, 2):
            model.module.times = 2
            with pytest.raises(RuntimeError, match=SAID_BY_TORCH):
                plain_step(model, x, index)
            model.module.times = 1
            model.zero_grad()
        plain_step(model, x, index)

    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            model = lambda: Checkpointed(True)  # noqa: E731
            check(rank, world, model, step=step, ddp=settings, against=["single"], steps=4)

    pool.run(run, timeout=LIMIT)


def test_when_it_happens_on_one_rank_alone_the_other_fails_as_well(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> str:
        model = DDP(seeded(lambda: Checkpointed(True)), bucket_cap_mb=0)
        plain_step(model, batch(0, rank), 0)
        model.module.times = 1 + rank
        with pytest.raises(RuntimeError) as caught:
            plain_step(model, batch(1, rank), 1)
        return str(caught.value)

    other, culprit = pool.run(run, timeout=30)
    assert SAID_BY_TORCH in culprit
    assert "middle.0." in culprit
    assert "rank 1 raised" in other


# ------------------------------------------------------------------ around the module


class Plain(nn.Module):
    """No checkpoint inside; ``normed`` adds buffers that are synchronised in forward."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


@both_kinds
@both_ways
def test_a_checkpoint_around_the_wrapped_module(
    pool: WorkerPool, reentrant: bool, views: bool
) -> None:
    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        x = x.clone().requires_grad_()
        loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()

    def with_the_loss(model: nn.Module, x: Tensor, _index: int) -> None:
        x = x.clone().requires_grad_()
        checkpoint(lambda x: loss_of(model(x)), x, use_reentrant=reentrant).backward()

    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            for way in (step, with_the_loss):
                check(rank, world, Plain, step=way, ddp=settings, against=["single"], steps=4)
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, Plain, step=step, ddp=settings, against=["torch"], steps=4)

    pool.run(run, timeout=LIMIT)


@both_ways
def test_a_checkpoint_around_the_wrapped_module_leaves_the_ranks_equal_with_buffers(
    pool: WorkerPool, reentrant: bool
) -> None:
    def run(rank: int, world: int) -> dict[str, Tensor]:
        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            x = x.clone().requires_grad_()
            loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()

        model = DDP(seeded(lambda: Plain(normed=True)))
        history = train(model, lambda i: batch(i, rank), step=step, steps=4)
        return history.weights[-1]

    first, second = pool.run(run, timeout=LIMIT)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@both_ways
def test_a_checkpoint_around_a_module_with_checkpoints_inside(
    pool: WorkerPool, reentrant: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for inner in (False, True):

            def step(model: nn.Module, x: Tensor, _index: int) -> None:
                x = x.clone().requires_grad_()
                loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()

            def make(inner: bool = inner) -> nn.Module:
                return Checkpointed(inner)

            for settings in ({}, {"find_unused_parameters": True}):
                check(rank, world, make, step=step, ddp=settings, against=["single"])

    pool.run(run, timeout=LIMIT)


# ------------------------------------------------------------------ outputs in strange vessels


class Attributes:
    def __init__(self, y: Tensor) -> None:
        self.y = y

    def tensor(self) -> Tensor:
        return self.y


class Nested(Attributes):
    def __init__(self, y: Tensor) -> None:
        self.inner = {"list": [None, Attributes(y)], "name": "nested"}

    def tensor(self) -> Tensor:
        return self.inner["list"][1].y


def slotted(y: Tensor) -> Any:
    class Slotted:  # made on the worker: a class that is sent there gets a __dict__
        __slots__ = ("y",)

        def tensor(self) -> Tensor:
            return self.y

    output = Slotted()
    output.y = y
    assert not hasattr(output, "__dict__")
    return output


class Closure:
    """Holds the tensor where nobody can look for it."""

    def __init__(self, y: Tensor) -> None:
        self.tensor = lambda: y


VESSELS = [Attributes, Nested, slotted, Closure]


def step_with_vessel(model: nn.Module, x: Tensor, _index: int) -> None:
    loss_of(model(x).tensor()).backward()


@both_ways
@pytest.mark.parametrize("vessel", VESSELS, ids=lambda c: c.__name__)
def test_an_output_object_with_checkpoints_over_several_layers_is_right_in_every_step(
    pool: WorkerPool, vessel: Callable[[Tensor], Any], reentrant: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}):
            check(rank, world, lambda: Deep(reentrant, vessel), step=step_with_vessel, ddp=more)

    pool.run(run, timeout=LIMIT)


@both_ways
@pytest.mark.parametrize("vessel", VESSELS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("mode", ["static_graph", "find_unused_parameters"])
def test_an_output_object_with_checkpoints_is_right_where_torch_fails(
    pool: WorkerPool, mode: str, vessel: Callable[[Tensor], Any], reentrant: bool
) -> None:
    """With tensors that it does not find, torch raises or leaves gradients unreduced."""

    def run(rank: int, world: int) -> None:
        how: dict[str, Any] = {"step": step_with_vessel, "ddp": {mode: True}}
        check(rank, world, lambda: Deep(reentrant, vessel), against=["single"], **how)

    pool.run(run, timeout=LIMIT)
