"""Mixed precision together with other features, and what of it is saved."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from low_precision import (
    LIMIT,
    LOW,
    Net,
    Words,
    assert_full,
    bf16,
    follow_float32,
    grads,
    low_gradients,
    plain,
    seeded,
    weights_of,
)
from oracles import FEATURES, batch, loss_of
from replicas import assert_equal_on_all_ranks, caught
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync import DistributedDataParallel as DDP
from gradsync import MixedPrecision
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


# ------------------------------------------------------------------ together with others


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.inner = Net()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


def recompute_with_reentry() -> nn.Module:
    return Recomputed(True)


def recompute() -> nn.Module:
    return Recomputed(False)


def test_checkpoints_are_recomputed_in_the_low_dtype(pool: WorkerPool) -> None:
    def over_all(model: nn.Module, x: Tensor, index: int) -> None:
        """The whole wrapper is checkpointed."""
        x = x.clone().requires_grad_()
        loss_of(checkpoint(model, x, use_reentrant=index % 2 == 0)).backward()

    def run(rank: int, world: int) -> None:
        for views, make in itertools.product((False, True), (recompute, recompute_with_reentry)):
            for static in (False, True):
                follow_float32(
                    rank,
                    world,
                    plain,
                    make,
                    gradient_as_bucket_view=views,
                    static_graph=static,
                    hint=f"{make.__name__} {views} {static}",
                )
        follow_float32(rank, world, over_all)

    pool.run(run, ranks=2, **LIMIT)


def test_a_hook_sees_the_reduce_dtype(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        seen = []

        def hook(state, bucket):
            seen.append(bucket.buffer().dtype)
            return allreduce_hook(dist.group.WORLD, bucket)

        for views, reduce in itertools.product((False, True), (torch.float32, torch.bfloat16)):
            seen.clear()
            follow_float32(
                rank,
                world,
                plain,
                mixed_precision=bf16(reduce_dtype=reduce),
                gradient_as_bucket_view=views,
                before=lambda ddp: ddp.register_comm_hook(None, hook),
            )
            assert set(seen) == {reduce}
        for ours in (gradsync.hooks.BF16, gradsync.hooks.FP16):
            follow_float32(
                rank,
                world,
                plain,
                before=lambda ddp, ours=ours: ddp.register_comm_hook(None, ours()),
            )

    pool.run(run, ranks=2, **LIMIT)


def test_optimizers_in_backward_step_the_full_parameters(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
        ):
            made = [
                DDP(
                    seeded(),
                    mixed_precision=bf16(reduce_dtype=torch.float32),
                    bucket_cap_mb=0.0002,
                    **options,
                )
                for _ in range(2)
            ]
            mine, plain_one = made
            mine.optimize_in_backward(torch.optim.Adam, lr=0.01)
            optimizer = torch.optim.Adam(plain_one.parameters(), lr=0.01)
            for step in range(4):
                plain(mine, batch(step, rank), step)
                optimizer.zero_grad()
                plain(plain_one, batch(step, rank), step)
                optimizer.step()
                assert_full(mine)
                assert not grads(mine)
                for name, value in weights_of(plain_one).items():
                    assert torch.equal(value, weights_of(mine)[name]), f"{options}: {name}"

    pool.run(run, ranks=2, **LIMIT)


def test_uneven_inputs_join(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for make, inputs in ((Net, batch(0, rank)), (Words, torch.tensor([1, rank]))):
            ddp = DDP(seeded(make), mixed_precision=bf16(reduce_dtype=torch.float32))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            with ddp.join():
                for _ in range(2 + 2 * rank):
                    optimizer.zero_grad()
                    loss_of(ddp(inputs)).backward()
                    assert_full(ddp)
                    optimizer.step()
            assert_full(ddp)
            assert_equal_on_all_ranks(ddp.parameters())
            assert not torch.equal(ddp.module.last.weight, seeded(make).last.weight)

    pool.run(run, ranks=2, **LIMIT)


def test_explicit_synchronisation_and_sums(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        config = bf16(reduce_dtype=torch.float32)
        for reduce in ("mean", "sum"):
            ddp = DDP(seeded(), mixed_precision=config, reduce=reduce)
            expected = low_gradients(weights_of(ddp), config, 0, world)
            with ddp.no_sync():
                plain(ddp, batch(0, rank), 0)
            ddp.sync_grads()
            assert_full(ddp)
            times = 1 if reduce == "mean" else world
            for name, gradient in grads(ddp).items():
                assert torch.equal(gradient, expected[name] * times), name

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ state


def test_state_is_full_at_any_time_and_loads_back(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        low = torch.bfloat16
        config = MixedPrecision(low, torch.float32, low)
        for options in ({}, {"plain_state_dict": True}):
            ddp = DDP(seeded(), mixed_precision=config, **options)
            prefix = "" if options else "module."
            before = copy.deepcopy(ddp.state_dict())
            expected = low_gradients(weights_of(ddp), config, 0, world)
            output = ddp(batch(0, rank))
            between = ddp.state_dict()
            inner = ddp.module.state_dict()
            assert between.keys() == before.keys()
            for name, value in between.items():
                assert value.dtype == (torch.int64 if "calls" in name else torch.float32), name
                assert torch.equal(value, before[name]), name
                assert torch.equal(value, inner[name.removeprefix(prefix)]), name
            loss_of(output).backward()  # through the convolution, after the state was taken
            for name, gradient in grads(ddp).items():
                assert torch.equal(gradient, expected[name]), name

            # The state holds the parameters themselves, as it does without mixed precision.
            torch.optim.SGD(ddp.parameters(), lr=0.1).step()
            assert torch.equal(between[f"{prefix}scale"], ddp.module.scale)
            changed = weights_of(ddp)

            # Loading counts too while a forward waits for its backward.
            output = ddp(batch(1, rank))
            ddp.load_state_dict(before)
            assert_full(ddp)
            error = caught(loss_of(output).backward, RuntimeError)  # as in one process
            assert "modified by an inplace operation" in str(error)
            assert_full(ddp)
            for name, value in weights_of(ddp).items():
                assert torch.equal(value, before[prefix + name]), name
            assert any(not torch.equal(changed[n], before[prefix + n]) for n in changed)
            assert ddp.module.offset.dtype == low

    pool.run(run, ranks=2, **LIMIT)


def test_the_optimizer_finds_full_parameters_and_gradients(pool: WorkerPool) -> None:
    class Looks(torch.optim.Adam):
        def step(self, closure: None = None) -> None:
            for param in self.param_groups[0]["params"]:
                assert param.dtype == param.grad.dtype == torch.float32
            super().step(closure)
            for state in self.state.values():
                assert state["exp_avg"].dtype == torch.float32

    def run(rank: int, world: int) -> None:
        for low, views in itertools.product(LOW, (False, True)):
            config = MixedPrecision(low, low, low)
            ddp = DDP(seeded(), mixed_precision=config, gradient_as_bucket_view=views)
            optimizer = Looks(ddp.parameters(), lr=1e-4)
            start = weights_of(ddp)
            for step in range(3):
                optimizer.zero_grad()
                plain(ddp, batch(step, rank), step)
                optimizer.step()
            # Steps too small for bfloat16 are not lost.
            moved = (ddp.module.scale - start["scale"]).abs()
            assert moved.max() > 0
            assert torch.equal(start["scale"].bfloat16(), ddp.module.scale.detach().bfloat16()), (
                "the steps are visible in bfloat16 as well: take a smaller lr"
            )

    pool.run(run, ranks=2, **LIMIT)


def test_a_wrapper_can_be_pickled_and_copied(pool: WorkerPool) -> None:
    def make() -> nn.Module:  # of classes that a worker can import
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))

    def run(rank: int, world: int) -> None:
        low = torch.bfloat16
        config = MixedPrecision(low, torch.float32, low)
        ddp = DDP(make(), mixed_precision=config)
        plain(ddp, batch(0, rank), 0)
        ddp.zero_grad()
        stored = io.BytesIO()
        torch.save(ddp, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        assert loaded.mixed_precision == config
        for each in (loaded, ddp):
            plain(each, batch(1, rank), 1)
            assert_full(each)
            assert_equal_on_all_ranks(grads(each).values())
            assert each.module[1].running_mean.dtype == low
            assert each.state_dict()["module.1.running_mean"].dtype == torch.float32
        for name, gradient in grads(ddp).items():
            assert torch.equal(gradient, grads(loaded)[name]), name

        before = weights_of(ddp)
        twin = copy.deepcopy(ddp.module)
        output = ddp(batch(2, rank))
        assert_full(twin)
        loss_of(output).backward()
        torch.optim.SGD(ddp.parameters(), lr=1.0).step()
        for name, value in twin.state_dict().items():
            assert value.dtype == before[name].dtype, name
            assert torch.equal(value, before[name]), name

    pool.run(run, ranks=2, **LIMIT)


def test_the_full_dtype_can_change_later(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        low = torch.bfloat16
        ddp = DDP(seeded(), mixed_precision=MixedPrecision(low, torch.float32, low))
        plain(ddp, batch(0, rank), 0)
        ddp.zero_grad()
        pending = ddp(batch(0, rank))
        ddp.to(torch.float64)
        assert_full(ddp, torch.float64)
        assert ddp.module.offset.dtype == low
        del pending
        for step in range(2):
            ddp.zero_grad()
            output = ddp(batch(step, rank))
            assert output.dtype == low
            loss_of(output).backward()
            assert_full(ddp, torch.float64)
            assert_equal_on_all_ranks(grads(ddp).values())
        ddp.to(torch.float32).to(torch.float64)
        ddp.sync_grads()
        assert_full(ddp, torch.float64)
        for name, value in ddp.state_dict().items():
            assert value.dtype == (torch.int64 if "calls" in name else torch.float64), name

    pool.run(run, ranks=2, **LIMIT)
