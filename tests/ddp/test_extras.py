"""What torch's class does not have: sums, explicit synchronisation, complex parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles import FEATURES, Net, batch, check, loss_of, seeded
from replicas import Branches, TorchDDP, assert_equal_on_all_ranks, assert_same, caught, gradients
from replicas import batch as rows
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradsync import DistributedDataParallel as DDP
from gradsync import ModelMismatchError, StateError
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)

LIMIT = {"timeout": 40.0, "group_timeout": 15.0}

Step = Callable[[nn.Module, int, int], None]


def step(model: nn.Module, rank: int, index: int = 0) -> None:
    loss_of(model(batch(index, rank))).backward()


# ------------------------------------------------------------------ reduce="sum"


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embedding(ids))


def large() -> nn.Module:
    """One gradient of more than a MiB, and small ones."""
    return nn.Sequential(nn.Linear(FEATURES, 1024), nn.Linear(1024, 300), nn.Linear(300, 2))


def sparse_step(model: nn.Module, rank: int, index: int) -> None:
    loss_of(model(torch.tensor([1, rank + 2, index]))).backward()


def branch_step(model: nn.Module, rank: int, index: int) -> None:
    loss_of(model(rows(rank, index), *([0] * (rank == 0) + [1] * (index % 2)))).backward()


def accumulating_step(model: nn.Module, rank: int, index: int) -> None:
    with model.no_sync():  # type: ignore[operator]
        step(model, rank, index + 10)
    step(model, rank, index)


def test_the_sum_is_torchs_mean_times_the_ranks(pool: WorkerPool) -> None:
    cases: dict[str, tuple[Callable[[], nn.Module], Step, dict[str, Any]]] = {
        "small": (Net, step, {}),
        "several buckets": (Net, step, {"bucket_cap_mb": 0.0002}),
        "large": (large, step, {"bucket_cap_mb": 1}),
        "sparse": (Words, sparse_step, {}),
        "unused": (Branches, branch_step, {"find_unused_parameters": True}),
        "accumulated": (Net, accumulating_step, {}),
        "static": (Net, step, {"static_graph": True}),
    }

    def run(rank: int, world: int) -> None:
        for (name, (make, step_of, options)), views in itertools.product(
            cases.items(), (False, True)
        ):
            mean = TorchDDP(seeded(make), gradient_as_bucket_view=views, **options)
            total = DDP(seeded(make), gradient_as_bucket_view=views, reduce="sum", **options)
            for index in range(4):
                for model in (mean, total):
                    model.zero_grad()
                    step_of(model, rank, index)
                where = f"{name}, views {views}, step {index}"
                expected = {
                    n: None if g is None else g * world for n, g in gradients(mean.module).items()
                }
                assert_same(gradients(total.module), expected, where)
            if name == "large":
                assert max(total.stats().bucket_bytes) > 1 << 20

    pool.run(run, ranks=2, **LIMIT)


def test_three_ranks_sum_too(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        mean, total = DDP(seeded(Net)), DDP(seeded(Net), reduce="sum")
        for model in (mean, total):
            step(model, rank)
        for name, gradient in gradients(total.module).items():
            torch.testing.assert_close(gradient, gradients(mean.module)[name] * world)
        assert_equal_on_all_ranks(param.grad for param in total.parameters())

    pool.run(run, ranks=3, **LIMIT)


def test_ranks_that_disagree_on_the_reduction_are_all_told(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> str:
        reduce = "sum" if rank == 1 else "mean"
        return str(caught(lambda: DDP(nn.Linear(2, 2), reduce=reduce), ModelMismatchError))

    for message in pool.run(run, ranks=3, **LIMIT):
        for word in ("reduce", "mean", "sum"):
            assert word in message


def test_a_hook_and_a_sum_exclude_each_other(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Net), reduce="sum")
        error = caught(lambda: ddp.register_comm_hook(None, allreduce_hook), StateError)
        assert 'reduce="sum"' in str(error)
        step(ddp, rank)
        assert_equal_on_all_ranks(param.grad for param in ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ sync_grads


def test_gradients_of_no_sync_are_averaged(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"bucket_cap_mb": 0.0002},
        ):
            ours, plain = DDP(seeded(Net), **options), DDP(seeded(Net))
            for index in range(4):
                ours.zero_grad(set_to_none=index % 2 == 0)
                plain.zero_grad()
                with ours.no_sync():
                    step(ours, rank, index)
                ours.sync_grads()
                step(plain, rank, index)
                assert_same(gradients(ours.module), gradients(plain.module), f"{options} {index}")
                # In between, steps are reduced as ever.
                ours.zero_grad()
                plain.zero_grad()
                step(ours, rank, index + 20)
                step(plain, rank, index + 20)
                assert_same(gradients(ours.module), gradients(plain.module), f"{options} {index}")
            assert ours._get_ddp_logging_data()["has_error"] == 0

    pool.run(run, ranks=2, **LIMIT)


def test_gradients_that_some_ranks_have_go_to_all_and_what_nobody_has_stays_none(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
            {"bucket_cap_mb": 0.00002},
        ):
            ddp = DDP(seeded(Net), **options)
            net = ddp.module
            for _ in range(2):
                ddp.zero_grad()
                net.first.weight.grad = torch.full_like(net.first.weight, rank + 1.0)
                if rank == 1:
                    net.last.bias.grad = torch.full_like(net.last.bias, 8.0)
                ddp.sync_grads()
                where = f"{options}"
                assert net.first.weight.grad.eq(sum(range(1, world + 1)) / world).all(), where
                assert net.last.bias.grad is not None, where
                assert net.last.bias.grad.sub(8 / world).abs().max() < 1e-6, where
                for param in (net.first.bias, net.second.weight, net.second.bias, net.last.weight):
                    assert param.grad is None, where
            ddp.zero_grad()
            ddp.sync_grads()  # nobody has any
            assert all(param.grad is None for param in ddp.parameters()), where
            step(ddp, rank)
            assert_equal_on_all_ranks(param.grad for param in ddp.parameters())

    for ranks in (2, 3):
        pool.run(run, ranks=ranks, **LIMIT)


def test_large_and_sparse_gradients_set_by_hand(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for views in (False, True):
            ddp = DDP(seeded(large), bucket_cap_mb=1, gradient_as_bucket_view=views)
            for _ in range(3):
                for param in ddp.parameters():
                    param.grad = torch.full_like(param, float(rank))
                ddp.sync_grads()
                assert all(p.grad.eq((world - 1) / 2).all() for p in ddp.parameters())
            words = DDP(seeded(Words), gradient_as_bucket_view=views)
            for here in (True, rank == 1):
                words.zero_grad()
                if here:
                    with words.no_sync():
                        sparse_step(words, rank, 0)
                words.sync_grads()
                gradient = words.module.embedding.weight.grad
                assert gradient is not None
                assert gradient.is_sparse
                assert_equal_on_all_ranks([gradient, words.module.last.weight.grad])
                assert gradient.to_dense()[3].abs().sum() > 0  # rank 1's row

    pool.run(run, ranks=2, **LIMIT)


def test_twice_in_a_row_changes_nothing_more(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for views in (False, True):
            ddp = DDP(seeded(Net), gradient_as_bucket_view=views)
            with ddp.no_sync():
                step(ddp, rank)
            ddp.sync_grads()
            once = gradients(ddp.module)
            ddp.sync_grads()
            assert_same(gradients(ddp.module), once)
            # It also takes part in accumulation: what comes now is added.
            step(ddp, rank)
            for name, gradient in gradients(ddp.module).items():
                torch.testing.assert_close(gradient, once[name] * 2)

    pool.run(run, ranks=2, **LIMIT)


def test_between_forward_and_backward_the_backward_is_still_reduced(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ours, plain = DDP(seeded(Net)), DDP(seeded(Net))
        loss = loss_of(ours(batch(0, rank)))
        ours.sync_grads()
        loss.backward()
        step(plain, rank)
        assert_same(gradients(ours.module), gradients(plain.module))

    pool.run(run, ranks=2, **LIMIT)


def test_inside_a_backward_it_is_refused(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Net))
        for context in (ddp.no_sync, None):
            ddp.zero_grad()

            def backward() -> None:
                output = ddp(batch(0, rank))
                output.register_hook(lambda _gradient: ddp.sync_grads())
                loss_of(output).backward()

            if context is None:
                error = caught(backward, StateError)
            else:
                with context():
                    error = caught(backward, StateError)
            assert "sync_grads()" in str(error)
            assert "inside a backward" in str(error)
        ddp.zero_grad()
        step(ddp, rank)
        assert_equal_on_all_ranks(param.grad for param in ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_delayed_parameters_are_included(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for everything in (False, True):
            net = seeded(Net)
            named = list(net.named_parameters())
            ddp = DDP(
                net,
                delay_all_reduce_named_params=named if everything else named[:2],
                param_to_hook_all_reduce=net.first.weight,
            )
            for param in ddp.parameters():
                param.grad = torch.full_like(param, float(rank))
            ddp.sync_grads()
            assert all(p.grad.eq((world - 1) / 2).all() for p in ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_it_costs_the_collectives_of_a_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Net))
        for index in range(3):
            step(ddp, rank, index)
        with count_collectives() as counted:
            ddp.sync_grads()
        assert counted.total == 1

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ complex parameters


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5, dtype=torch.complex64)
        self.second = nn.Linear(5, 4, dtype=torch.complex64)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x.to(torch.complex64)))).abs())


def test_complex_parameters_train_as_in_one_process(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"bucket_cap_mb": 0.0001},
        ):
            check(rank, world, Waves, ddp=options, against=("single",))
        total = DDP(seeded(Waves), reduce="sum")
        mean = DDP(seeded(Waves))
        for model in (total, mean):
            step(model, rank)
        for name, gradient in gradients(total.module).items():
            torch.testing.assert_close(gradient, gradients(mean.module)[name] * world)
        with mean.no_sync():
            step(mean, rank)
        mean.sync_grads()
        parts = [
            torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in mean.parameters()
        ]
        assert_equal_on_all_ranks(parts)

    for ranks in (1, 2, 3):
        pool.run(run, ranks=ranks, **LIMIT)


def test_a_model_of_nothing_but_complex_parameters_can_fail_and_go_on(pool: WorkerPool) -> None:
    """What the ranks report travels behind complex gradients then."""

    def run(rank: int, world: int) -> None:
        ddp = DDP(nn.Linear(FEATURES, 2, dtype=torch.complex64))
        loss = loss_of(ddp(batch(0, rank).to(torch.complex64)))
        if rank == 1:
            ddp.module.bias.register_hook(lambda _gradient: 1 / 0)
            caught(loss.backward, ZeroDivisionError)
        else:
            error = caught(loss.backward)
            assert "rank 1" in str(error)
        dist.barrier()

    pool.run(run, ranks=2, **LIMIT)
