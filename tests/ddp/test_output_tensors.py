"""The tensors that a module returns: used in the loss or not, parameters, constants, views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import FEATURES, Net, batch, check, loss_of, plain_step, seeded
from output_parts import LIMIT, MODES, TwoHeads
from replicas import both_kinds
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


# ------------------------------------------------------------------ not all of it in the loss


@both_kinds
def test_an_output_may_be_left_out_of_the_loss_if_its_parameters_get_gradients(
    pool: WorkerPool, views: bool
) -> None:
    class Both(TwoHeads):
        def forward(self, x: Tensor) -> Any:
            left, right = super().forward(x)
            return {"loss": left.sum(1) + right.sum(1), "left": left, "right": right}

    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)["loss"]).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            settings = mode | {"gradient_as_bucket_view": views}
            check(rank, world, lambda: Both(lambda a, b: (a, b)), step=step, ddp=settings)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_a_head_that_the_loss_does_not_use_is_unused_and_stays_without_gradient(
    pool: WorkerPool, views: bool
) -> None:
    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)[0]).backward()

    def changing(model: nn.Module, x: Tensor, index: int) -> None:
        loss_of(model(x)[index % 2]).backward()

    def run(rank: int, world: int) -> None:
        make = lambda: TwoHeads(lambda a, b: (a, b))  # noqa: E731
        settings = {"gradient_as_bucket_view": views}
        for mode in ({"static_graph": True}, {"find_unused_parameters": True}):
            ours = check(rank, world, make, step=step, ddp=settings | mode, against=["single"])
            assert ours.grads[-1]["right.weight"] is None
        # torch takes a parameter behind an output for used, and fails where the loss differs
        for caps in ({}, {"bucket_cap_mb": 0}):
            mode = {"find_unused_parameters": True} | caps | settings
            check(rank, world, make, step=changing, ddp=mode, against=["single"], steps=5)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_ranks_may_use_different_outputs(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            if isinstance(model, DDP):
                loss_of(model(x)[rank]).backward()
            else:
                rows = len(x) // world
                outputs = [model(part)[each] for each, part in enumerate(x.split(rows))]
                (loss_of(outputs) / world).backward()

        make = lambda: TwoHeads(lambda a, b: (a, b))  # noqa: E731
        for mode in ({"find_unused_parameters": True}, {"static_graph": True}):
            settings = mode | {"gradient_as_bucket_view": views}
            check(rank, world, make, step=step, ddp=settings, against=["single"], steps=4)

    pool.run(run, timeout=LIMIT)


def test_without_the_search_an_unused_head_is_an_error_that_names_it_on_all_ranks(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> str:
        model = DDP(seeded(lambda: TwoHeads(lambda a, b: (a, b))))
        loss_of(model(batch(0, rank))[0]).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
            model(batch(1, rank))
        return str(caught.value)

    for text in pool.run(run, timeout=LIMIT):
        assert "right.weight, right.bias" in text
        assert "left.weight" not in text


def test_a_loss_on_an_output_without_parameters_behind_it_is_a_step_without_gradients(
    pool: WorkerPool,
) -> None:
    class Passing(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x * 2

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        outputs = model(x.clone().requires_grad_())
        loss_of(outputs[index % 2]).backward()

    def run(rank: int, world: int) -> None:
        mode = {"find_unused_parameters": True}
        check(rank, world, Passing, step=step, ddp=mode, against=["single"], steps=5)

    pool.run(run, timeout=LIMIT)


# ------------------------------------------------------------------ special tensors


class WithParameter(Net):
    """Returns a parameter as it is, as where weights are decayed in the loss."""

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x), "weight": self.first.weight}


class ParameterOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS_OF_ITS_OWN, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


ROWS_OF_ITS_OWN = 2


@both_kinds
def test_an_output_may_be_a_parameter_itself(pool: WorkerPool, views: bool) -> None:
    def decay(model: nn.Module, x: Tensor, _index: int) -> None:
        output = model(x)
        (loss_of(output["y"]) + 0.1 * loss_of(output["weight"])).backward()

    def times_the_batch(model: nn.Module, x: Tensor, _index: int) -> None:
        (model(x) * x.mean(0)).square().sum().backward()

    def half_by_half(model: nn.Module, x: Tensor, index: int) -> None:
        weight = model(x)
        assert weight.is_leaf
        terms = [(weight * part.mean()).square().sum() for part in x.split(4)]
        torch.stack(terms).mean().backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            settings = mode | {"gradient_as_bucket_view": views}
            # with these, torch returns a copy in place of the parameter
            against = ["single"] if "bucket_cap_mb" not in mode and mode else ["torch", "single"]
            check(rank, world, WithParameter, step=decay, ddp=settings, against=against)
            check(rank, world, ParameterOnly, step=half_by_half, ddp=settings, against=["single"])
            if against != ["single"]:
                how = {"step": times_the_batch, "ddp": settings, "against": ["torch"]}
                check(rank, world, ParameterOnly, **how)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_outputs_that_need_no_gradient_are_passed_beside_those_that_do(
    pool: WorkerPool, views: bool
) -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            with torch.no_grad():
                silent = y[:, 0] * 2
            return {"y": y, "detached": y.detach(), "labels": y.argmax(1), "x": x, "n": silent}

    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        output = model(x)
        assert [t.requires_grad for t in output.values()] == [True] + [False] * 4
        loss_of(output["y"] + output["detached"]).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Mixed, step=step, ddp=mode | {"gradient_as_bucket_view": views})

    pool.run(run, timeout=LIMIT)


def test_a_forward_whose_outputs_all_need_no_gradient_is_no_step(pool: WorkerPool) -> None:
    class Sometimes(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.detach() if silent else y

    silent: list[bool] = []

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        silent.append(True)
        assert not model(x).requires_grad
        silent.clear()
        plain_step(model, x, index)

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Sometimes, step=step, ddp=mode, against=["single"])

    pool.run(run, timeout=LIMIT)


def returned_view(y: Tensor) -> Tensor:
    return y.view(-1)


def returned_slice(y: Tensor) -> Tensor:
    return y[:, :2]


def returned_transposed(y: Tensor) -> Tensor:
    return y.t()


def returned_itself(y: Tensor) -> Tensor:
    return y


def view_changed_before(y: Tensor) -> Tensor:
    part = y[:, :2]
    part.mul_(0.5)
    return part


def base_changed_by_a_view(y: Tensor) -> Tensor:
    y[:, 0].mul_(0.5)
    return y


def view_of_a_view_of_a_fresh_tensor(y: Tensor) -> Tensor:
    fresh = torch.zeros(len(y), 4)
    fresh[:, :3] = y
    return fresh.t()[:2]


MADE = [
    returned_view,
    returned_slice,
    returned_transposed,
    returned_itself,
    view_changed_before,
    base_changed_by_a_view,
    view_of_a_view_of_a_fresh_tensor,
]


@both_kinds
@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_an_output_may_be_a_view_and_be_changed_in_place(
    pool: WorkerPool, make: Callable[[Tensor], Tensor], views: bool
) -> None:
    class Viewing(Net):
        def forward(self, x: Tensor) -> Any:
            return {"y": make(super().forward(x))}

    def left_alone(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)).backward()

    def changed(model: nn.Module, x: Tensor, _index: int) -> None:
        y = model(x)["y"]
        y.mul_(0.5)
        y.narrow(0, 0, len(y)).add_(0.1)
        loss_of(torch.tanh(y)).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            settings = mode | {"gradient_as_bucket_view": views}
            for step in (left_alone, changed):
                # a copy of torch's in these modes is a view that must not be changed
                strict = not mode or "bucket_cap_mb" in mode
                against = ["torch"] if strict or step is left_alone else []
                check(rank, world, Viewing, step=step, ddp=settings, against=[*against, "single"])

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_parts_of_one_tensor_may_be_returned_and_used_apart(pool: WorkerPool, views: bool) -> None:
    class Parts(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).split(1, dim=1)

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        loss_of(model(x)[index % 3]).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Parts, step=step, ddp=mode | {"gradient_as_bucket_view": views})

    pool.run(run, timeout=LIMIT)
