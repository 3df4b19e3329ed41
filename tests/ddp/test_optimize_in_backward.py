"""Optimizers in the backward: the weights of the plain loop, and earlier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracles import FEATURES, Net, batch, loss_of
from replicas import Branches, assert_equal_on_all_ranks, caught
from replicas import batch as rows
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradsync
from gradsync import ArgumentError, PeerStepError
from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)

LIMIT = {"timeout": 40.0, "group_timeout": 15.0}

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adam, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
]

SMALL = 0.0002  # MiB: a bucket for each layer
Step = Callable[[nn.Module, int, int], None]


def plain_step(model: nn.Module, rank: int, index: int) -> None:
    loss_of(model(batch(index, rank))).backward()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return make()


def compare(
    rank: int,
    *,
    optimizer: tuple[type[Optimizer], dict[str, Any]] = OPTIMIZERS[2],
    make: Callable[[], nn.Module] = Net,
    step: Step = plain_step,
    steps: int = 4,
    some: Callable[[nn.Module], list[nn.Parameter]] = lambda module: list(module.parameters()),
    mark: Callable[[DDP, list[nn.Parameter]], object] | None = None,
    prepare: Callable[[nn.Module], object] = lambda module: None,
    after: Callable[[DDP], object] = lambda ddp: None,
    **options: Any,
) -> DDP:
    """Train with and without; the weights have to be the same bits after each step."""
    kind, arguments = optimizer
    options.setdefault("bucket_cap_mb", SMALL)
    modules = [seeded(make), seeded(make)]
    prepare(modules[0])
    mine, reference = [DDP(module, **options) for module in modules]
    if mark is not None:
        mark(mine, some(mine.module))
    for ddp in (mine, reference):
        after(ddp)
    optimizer_of_reference = kind(some(reference.module), **arguments)
    chosen = {id(param) for param in some(mine.module)}
    for index in range(steps):
        step(mine, rank, index)
        optimizer_of_reference.zero_grad()
        step(reference, rank, index)
        optimizer_of_reference.step()
        for (name, left), right in zip(
            mine.module.named_parameters(), reference.module.parameters(), strict=True
        ):
            where = f"{kind.__name__} {arguments} {options}, step {index}: {name}"
            assert torch.equal(left, right), where
            if id(left) in chosen:
                assert left.grad is None, where
    return mine


def torchs_way(
    kind: type[Optimizer], parameters: Iterable[nn.Parameter], arguments: dict[str, Any]
) -> None:
    # Only in the workers: the import takes long, and warns of TorchScript.
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, parameters, arguments)


def ours(kind: type[Optimizer], arguments: dict[str, Any]) -> Callable[..., object]:
    return lambda ddp, params: ddp.optimize_in_backward(kind, params, **arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_weights_are_those_of_the_plain_loop(pool: WorkerPool, ranks: int) -> None:
    def run(rank: int, world: int) -> None:
        for optimizer in OPTIMIZERS:
            for options in (
                {},
                {"gradient_as_bucket_view": True},
                {"static_graph": True},
                {"find_unused_parameters": True},
                {"bucket_cap_mb": 25},
                {"reduce": "sum"},
            ):
                ddp = compare(rank, optimizer=optimizer, mark=ours(*optimizer), **options)
                assert (ddp.stats().buckets > 1) == ("bucket_cap_mb" not in options)
        assert not torch.equal(ddp.module.first.weight, seeded(Net).first.weight)
        assert_equal_on_all_ranks(ddp.parameters())

    pool.run(run, ranks=ranks, **LIMIT)


def test_all_trained_parameters_are_stepped_by_default(pool: WorkerPool) -> None:
    def frozen() -> nn.Module:
        net = Net()
        net.second.requires_grad_(False)
        return net

    def run(rank: int, world: int) -> None:
        kind, arguments = OPTIMIZERS[1]
        compare(
            rank,
            optimizer=(kind, arguments),
            make=frozen,
            mark=lambda ddp, _: ddp.optimize_in_backward(kind, **arguments),
            some=lambda module: [p for p in module.parameters() if p.requires_grad],
        )

    pool.run(run, ranks=2, **LIMIT)


def test_torchs_marks_are_taken_over_before_and_after_wrapping(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for kind, arguments in OPTIMIZERS:
            for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
                compare(
                    rank,
                    optimizer=(kind, arguments),
                    prepare=lambda module, k=kind, a=arguments: torchs_way(
                        k, module.parameters(), a
                    ),
                    **options,
                )
                compare(
                    rank,
                    optimizer=(kind, arguments),
                    mark=lambda ddp, params, k=kind, a=arguments: torchs_way(k, params, a),
                    **options,
                )

    pool.run(run, ranks=2, **LIMIT)


def test_some_parameters_only_and_the_others_keep_their_gradients(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for views in (False, True):
            ddp = compare(
                rank,
                mark=ours(*OPTIMIZERS[2]),
                some=lambda module: [*module.first.parameters(), module.last.bias],
                gradient_as_bucket_view=views,
                steps=1,
            )
            kept = ddp.module.second.weight.grad
            assert kept is not None
            assert kept.abs().sum() > 0
            assert_equal_on_all_ranks([kept])

    pool.run(run, ranks=2, **LIMIT)


def test_different_optimizers_for_different_parameters(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        mine, reference = (DDP(seeded(Net), bucket_cap_mb=SMALL) for _ in range(2))
        mine.optimize_in_backward(SGD, mine.module.first.parameters(), lr=0.1)
        rest = [*mine.module.second.parameters(), *mine.module.last.parameters()]
        mine.optimize_in_backward(Adam, (param for param in rest), lr=0.01)
        net = reference.module
        optimizers = [
            SGD(net.first.parameters(), lr=0.1),
            Adam([*net.second.parameters(), *net.last.parameters()], lr=0.01),
        ]
        for index in range(3):
            plain_step(mine, rank, index)
            reference.zero_grad()
            plain_step(reference, rank, index)
            for optimizer in optimizers:
                optimizer.step()
        for left, right in zip(mine.parameters(), reference.parameters(), strict=True):
            assert torch.equal(left, right)

    pool.run(run, ranks=2, **LIMIT)


def test_parameters_that_some_or_all_ranks_leave_out(pool: WorkerPool) -> None:
    def step(model: nn.Module, rank: int, index: int) -> None:
        # Branch 0 is used by rank 0 only, branch 1 by all in odd steps and else by none.
        use = [0] * (rank == 0) + [1] * (index % 2)
        loss_of(model(rows(rank, index), *use)).backward()

    def alike(model: nn.Module, rank: int, index: int) -> None:
        loss_of(model(rows(rank, index), *([0] * (rank == 0)))).backward()

    def run(rank: int, world: int) -> None:
        for optimizer in OPTIMIZERS:
            for views in (False, True):
                options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.00005}
                compare(
                    rank,
                    optimizer=optimizer,
                    make=Branches,
                    step=step,
                    mark=ours(*optimizer),
                    find_unused_parameters=True,
                    steps=5,
                    **options,
                )
                compare(
                    rank,
                    optimizer=optimizer,
                    make=Branches,
                    step=alike,
                    mark=ours(*optimizer),
                    static_graph=True,
                    **options,
                )

    pool.run(run, ranks=2, **LIMIT)


def test_shared_parameters_are_stepped_once(pool: WorkerPool) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.second

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))

    def run(rank: int, world: int) -> None:
        for optimizer in OPTIMIZERS:
            compare(rank, optimizer=optimizer, make=Tied, mark=ours(*optimizer))
            compare(
                rank,
                optimizer=optimizer,
                make=Tied,
                prepare=lambda module, o=optimizer: torchs_way(o[0], module.parameters(), o[1]),
            )

    pool.run(run, ranks=2, **LIMIT)


def test_ignored_parameters_are_left_to_torchs_own_hook(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        module = seeded(Net)
        DDP._set_params_and_buffers_to_ignore_for_model(module, ["second.weight"])
        torchs_way(SGD, module.parameters(), {"lr": 0.1})
        ddp = DDP(module)
        single = seeded(Net)
        single.load_state_dict(module.state_dict())
        plain_step(ddp, rank, 0)
        loss_of(single(batch(0, rank))).backward()
        alone = single.second.weight
        assert torch.equal(module.second.weight, alone.detach().add(alone.grad, alpha=-0.1))
        assert_equal_on_all_ranks([module.first.weight, module.last.weight])
        # Ours, which nobody would run, is refused.
        caught(lambda: ddp.optimize_in_backward(SGD, [module.second.weight]), ArgumentError)

    pool.run(run, ranks=2, **LIMIT)


def test_gradients_gathered_without_sync_are_stepped_together(pool: WorkerPool) -> None:
    def accumulating(model: nn.Module, rank: int, index: int) -> None:
        with model.no_sync():
            plain_step(model, rank, 10 + index)
            assert all(param.grad is not None for param in model.parameters())
        plain_step(model, rank, index)

    def by_hand(model: nn.Module, rank: int, index: int) -> None:
        with model.no_sync():
            plain_step(model, rank, index)
        model.sync_grads()

    def run(rank: int, world: int) -> None:
        for views in (False, True):
            for step in (accumulating, by_hand):
                compare(rank, step=step, mark=ours(*OPTIMIZERS[2]), gradient_as_bucket_view=views)

    pool.run(run, ranks=2, **LIMIT)


def test_what_a_comm_hook_returns_is_stepped_with(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for hook in (allreduce_hook, gradsync.hooks.BF16()):
            for views in (False, True):
                compare(
                    rank,
                    mark=ours(*OPTIMIZERS[2]),
                    after=lambda ddp, hook=hook: ddp.register_comm_hook(None, hook),
                    gradient_as_bucket_view=views,
                )

    pool.run(run, ranks=2, **LIMIT)


def test_large_gradients_that_are_buckets_of_their_own(pool: WorkerPool) -> None:
    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 1024), nn.Linear(1024, 300), nn.Linear(300, 2))

    def run(rank: int, world: int) -> None:
        for views in (False, True):
            compare(
                rank,
                make=large,
                mark=ours(*OPTIMIZERS[2]),
                bucket_cap_mb=1,
                gradient_as_bucket_view=views,
                steps=3,
            )

    pool.run(run, ranks=2, **LIMIT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_are_stepped_while_the_backward_goes_on(pool: WorkerPool, ranks: int) -> None:
    def run(rank: int, world: int) -> list[tuple[str, int]]:
        events: list[tuple[str, int]] = []
        layers = seeded(lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))))
        numbers = {layer.weight: index for index, layer in enumerate(layers)}
        ddp = DDP(layers, bucket_cap_mb=0.00005)

        def backward_comes_to(index: int) -> None:
            """Before that of a layer: let the reduction of those behind it be over."""
            events.append(("backward", index))
            deadline = time.monotonic() + 10
            for bucket in ddp.reducer.buckets[: 3 - index]:
                while bucket.work is not None and not bucket.work.is_completed():
                    assert time.monotonic() < deadline
                    time.sleep(0.001)

        class Tells(SGD):
            def step(self, closure: None = None) -> None:
                events.append(("step", numbers[self.param_groups[0]["params"][0]]))
                super().step()

        for index, layer in enumerate(layers):
            layer.register_forward_hook(
                lambda _layer, _inputs, output, index=index: (
                    output.register_hook(lambda _gradient: backward_comes_to(index)) and None
                )  # or it would take the place of the output
            )
        ddp.optimize_in_backward(Tells, lr=0.1)
        for _ in range(2):
            events.clear()
            loss_of(ddp(rows(rank))).backward()
            events.append(("end", 0))
        return events

    for seen in pool.run(run, ranks=ranks, **LIMIT):
        # A bucket that is reduced is stepped when the next one is launched, at the latest.
        assert seen.index(("step", 3)) < seen.index(("backward", 0)), seen
        assert seen.index(("step", 2)) < seen.index(("step", 0)), seen
        assert seen.index(("step", 0)) < seen.index(("end", 0)), seen
        assert sorted(each for each in seen if each[0] == "step") == [
            ("step", index) for index in range(4)
        ]


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_replicas_stay_equal_when_a_backward_raises_on_one_rank(
    pool: WorkerPool, views: bool
) -> None:
    def unused_too() -> nn.Module:
        net = Net()
        net.unused = nn.Linear(2, 2)  # by anybody
        return net

    def run(rank: int, world: int) -> None:
        for options in (
            {"bucket_cap_mb": 0.0002},
            {"bucket_cap_mb": 25},
            {"bucket_cap_mb": 0.0002, "find_unused_parameters": True},
            {"bucket_cap_mb": 0.0002, "static_graph": True},
            {"mixed_precision": gradsync.MixedPrecision(torch.bfloat16, torch.float32)},
        ):
            make = unused_too if "find_unused_parameters" in options else Net
            ddp = DDP(seeded(make), gradient_as_bucket_view=views, **options)
            ddp.optimize_in_backward(Adam, lr=0.01, weight_decay=0.1)
            net = ddp.module
            for failing in (net.first.weight, net.second.bias, net.last.bias):
                for index in range(2):
                    plain_step(ddp, rank, index)
                output = ddp(batch(5, rank))
                handle = None
                if rank == 1:
                    handle = failing.register_hook(lambda _gradient: 1 / 0)
                caught(loss_of(output).backward, ZeroDivisionError if rank == 1 else PeerStepError)
                if handle is not None:
                    handle.remove()
                ddp.zero_grad()
                assert_equal_on_all_ranks(ddp.parameters())
                plain_step(ddp, rank, 7)
                assert_equal_on_all_ranks(ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_a_changed_learning_rate_counts(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        from torch.distributed.optim import _get_in_backward_optimizers

        ddp = DDP(seeded(Net))
        ddp.optimize_in_backward(SGD, lr=0.1)
        optimizers = _get_in_backward_optimizers(ddp.module)
        assert len(optimizers) == 6
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.0
        before = [param.detach().clone() for param in ddp.parameters()]
        plain_step(ddp, rank, 0)
        assert all(map(torch.equal, before, ddp.parameters()))

    pool.run(run, ranks=2, **LIMIT)


def test_arguments_that_cannot_be_are_refused_by_name(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        net, other = seeded(Net), Net()
        net.second.requires_grad_(False)
        ddp = DDP(net)
        before = [param.detach().clone() for param in net.parameters()]
        for optimizer in (SGD(net.first.parameters()), "SGD", None, nn.Linear):
            error = caught(lambda o=optimizer: ddp.optimize_in_backward(o, lr=0.1), ArgumentError)
            assert "optimizer" in str(error)
        for parameters in (
            other.parameters(),
            net.second.parameters(),
            net.parameters(),
            [],
            net.named_parameters(),
            [net.first.weight.detach()],
        ):
            error = caught(
                lambda p=parameters: ddp.optimize_in_backward(SGD, p, lr=0.1), ArgumentError
            )
            assert "parameters" in str(error)
        caught(lambda: ddp.optimize_in_backward(SGD, lr=-1), ValueError)
        caught(lambda: ddp.optimize_in_backward(SGD, rate=1), TypeError)
        # Nothing of that has left a trace.
        plain_step(ddp, rank, 0)
        assert all(map(torch.equal, before, net.parameters()))
        assert net.first.weight.grad is not None
        ddp.zero_grad()
        ddp.optimize_in_backward(SGD, lr=0.1)
        error = caught(lambda: ddp.optimize_in_backward(SGD, lr=0.1), ArgumentError)
        assert "already" in str(error)

    pool.run(run, ranks=1, **LIMIT)
