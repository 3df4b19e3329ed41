"""Mixed precision in steps of all kinds: right gradients, and nothing low is left behind."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_precision import (
    LIMIT,
    LOW,
    Net,
    Words,
    assert_close,
    assert_full,
    bf16,
    follow_float32,
    grads,
    low_gradients,
    plain,
    seeded,
    weights_of,
)
from oracles import FEATURES, batch, loss_of, no_sync, sgd
from replicas import assert_equal_on_all_ranks, caught
from step_ways import AS_IN_ONE_PROCESS
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync import MixedPrecision, StateError
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_every_order_of_forwards_and_backwards_follows_float32(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for way, dtype in itertools.product(AS_IN_ONE_PROCESS, LOW):
            follow_float32(
                rank,
                world,
                way,
                dtype=dtype,
                gradient_as_bucket_view=views,
                set_to_none=dtype is torch.bfloat16,
            )

    pool.run(run, ranks=2, **LIMIT)


def test_accumulation_without_sync_gathers_in_float32(pool: WorkerPool) -> None:
    def accumulating(model: nn.Module, x: Tensor, _index: int) -> None:
        with no_sync(model):
            loss_of(model(x)).backward()
            if isinstance(model, DDP):
                assert_full(model)
            loss_of(model(x * 2)).backward()
        loss_of(model(x * 0.5)).backward()

    def run(rank: int, world: int) -> None:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"mixed_precision": bf16()},
        ):
            for to_none in (False, True):
                follow_float32(
                    rank, world, accumulating, set_to_none=to_none, hint=f"{options}", **options
                )

    pool.run(run, ranks=2, **LIMIT)


class Parts(nn.Module):
    """A shared layer, a frozen one, and two of which each call names one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.again = self.stem
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.branch = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x: Tensor, *use: int) -> Tensor:
        x = torch.tanh(self.frozen(self.again(torch.tanh(self.stem(x)))))
        for index in use:
            x = x + self.branch[index](x)
        return x


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_parameters_that_one_rank_leaves_out_get_the_average(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        for config in (bf16(reduce_dtype=torch.float32), bf16(), bf16(reduce_dtype=torch.float16)):
            ddp = DDP(
                seeded(Parts),
                mixed_precision=config,
                find_unused_parameters=True,
                gradient_as_bucket_view=views,
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(4):
                parts = [Parts() for _ in range(world)]
                for each in parts:
                    each.load_state_dict(weights_of(ddp))
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                # Branch 1 is used by rank 1 only, and by nobody in the last step.
                uses = [(0,), (0, 1) if step < 3 else (0,)]
                loss_of(ddp(batch(step, rank), *uses[rank])).backward()
                for r, each in enumerate(parts):
                    loss_of(each(batch(step, r), *uses[r])).backward()
                assert_full(ddp)
                for name, param in ddp.module.named_parameters():
                    singles = [dict(each.named_parameters())[name].grad for each in parts]
                    there = [g for g in singles if g is not None]
                    if not there:
                        assert param.grad is None or not param.grad.any(), name
                        continue
                    mean = torch.stack(there).sum(0) / world
                    assert_close({name: param.grad}, {name: mean}, 4e-2, f"{config}, step {step}")
                optimizer.step()
            assert_equal_on_all_ranks(ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_frozen_and_shared_parameters_and_a_static_graph(pool: WorkerPool) -> None:
    def use_both(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x, 0, 1)).backward()

    def run(rank: int, world: int) -> None:
        for dtype, views, static in itertools.product(LOW, (False, True), (False, True)):
            ddp = follow_float32(
                rank,
                world,
                use_both,
                Parts,
                dtype=dtype,
                gradient_as_bucket_view=views,
                static_graph=static,
            )
            frozen = ddp.module.frozen.weight
            assert frozen.grad is None
            assert frozen.dtype == torch.float32
            assert torch.equal(frozen, seeded(Parts).frozen.weight)
            # Unfreezing rebuilds the reducer between two steps.
            ddp.module.frozen.requires_grad_(True)
            ddp.zero_grad()
            if not static:
                use_both(ddp, batch(5, rank), 5)
                assert frozen.grad is not None
                assert_full(ddp)
                assert_equal_on_all_ranks(grads(ddp).values())

    pool.run(run, ranks=2, **LIMIT)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_sparse_gradients_are_averaged_and_full(pool: WorkerPool, low: torch.dtype) -> None:
    def run(rank: int, world: int) -> None:
        for reduce in (None, torch.float32):
            for lacking in (False, True):
                config = MixedPrecision(low, reduce)
                ddp = DDP(seeded(Words), mixed_precision=config, find_unused_parameters=lacking)
                for step in range(2):
                    ddp.zero_grad()
                    ids = [torch.tensor([1, 3, r + 5]) for r in range(world)]
                    loss_of(ddp(ids[rank], not (lacking and rank == 0))).backward()
                    singles = []
                    for r in range(world):
                        single = Words()
                        single.load_state_dict(weights_of(ddp))
                        loss_of(single(ids[r], not (lacking and r == 0))).backward()
                        singles.append(single)
                    assert_full(ddp)
                    gradient = ddp.module.embedding.weight.grad
                    assert gradient is not None
                    assert gradient.is_sparse
                    there = [s.embedding.weight.grad for s in singles]
                    mean = sum(g.to_dense() for g in there if g is not None) / world
                    assert_close(
                        {"embedding": gradient.to_dense()}, {"embedding": mean}, 4e-2, f"{step}"
                    )
                    assert_equal_on_all_ranks([gradient])

    pool.run(run, ranks=2, **LIMIT)


def test_ignored_parameters_and_buffers_stay_as_they_are(pool: WorkerPool) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 2)
            self.own = nn.Parameter(torch.ones(2))
            self.register_buffer("mine", torch.ones(2))
            self.register_buffer("common", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = (self.own.dtype, self.mine.dtype, self.first.weight.dtype)
            return self.first(x) * self.own

    def run(rank: int, world: int) -> None:
        module = seeded(Part)
        DDP._set_params_and_buffers_to_ignore_for_model(module, ["own", "mine"])
        low = torch.bfloat16
        ddp = DDP(module, mixed_precision=MixedPrecision(low, low, low))
        for step in range(2):
            ddp.zero_grad()
            plain(ddp, batch(step, rank), step)
            assert module.seen == (torch.float32, torch.float32, low)
            assert_full(ddp)
            assert_equal_on_all_ranks([module.first.weight.grad])
            others = [torch.empty(2) for _ in range(world)]
            dist.all_gather(others, module.own.grad)
            assert not torch.equal(*others), "it was reduced"
        assert module.common.dtype == low
        assert module.mine.dtype == torch.float32

    pool.run(run, ranks=2, **LIMIT)


def test_evaluation_leaves_full_parameters_behind_and_needs_no_collective(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(), mixed_precision=bf16(), forward_sync_buffers=False)
        plain(ddp, batch(0, rank), 0)
        before = weights_of(ddp)
        ddp.eval()
        with count_collectives() as counted:
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    assert ddp(batch(1, rank)).dtype == torch.bfloat16
                assert_full(ddp)
        assert counted.total == 0
        ddp(batch(1, rank))  # gradients are on, and nobody asks for them
        assert_full(ddp)
        for name, value in weights_of(ddp).items():
            assert torch.equal(value, before[name]), name
        ddp.train()
        ddp.zero_grad()
        expected = low_gradients(before, bf16(), 2, world)
        plain(ddp, batch(2, rank), 2)
        for name, gradient in grads(ddp).items():
            assert torch.equal(gradient, expected[name]), name

    pool.run(run, ranks=2, **LIMIT)


def test_an_optimizer_step_after_a_forward_without_backward_is_not_lost(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(), mixed_precision=bf16())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        plain(ddp, batch(0, rank), 0)
        before = weights_of(ddp)
        ddp(batch(1, rank))  # its output is dropped
        optimizer.step()
        for name, param in ddp.module.named_parameters():
            assert torch.equal(param, before[name].add(param.grad, alpha=-0.1)), name
        # With the output alive, a backward may follow, so the parameters are low: that is told.
        for goes_back in (False, True):
            output = ddp(batch(1, rank))
            optimizer.step()
            if goes_back:
                error = caught(loss_of(output).backward, RuntimeError)
                assert "modified by an inplace operation" in str(error)
                assert_full(ddp)
            error = caught(lambda: ddp(batch(2, rank)), StateError)
            assert "mixed_precision" in str(error)
            assert "no_grad" in str(error)
            assert_full(ddp)
        ddp.zero_grad()
        expected = low_gradients(weights_of(ddp), bf16(), 3, world)
        plain(ddp, batch(3, rank), 3)
        for name, gradient in grads(ddp).items():
            assert torch.equal(gradient, expected[name]), name

    pool.run(run, ranks=2, **LIMIT)


def test_a_backward_through_an_outdated_graph_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(), mixed_precision=bf16())
        first = loss_of(ddp(batch(0, rank)))
        first.backward(retain_graph=True)
        second = loss_of(ddp(batch(1, rank)))
        error = caught(first.backward, StateError)
        assert "mixed_precision" in str(error)
        del first, second, error
        ddp.zero_grad()
        expected = low_gradients(weights_of(ddp), bf16(), 2, world)
        plain(ddp, batch(2, rank), 2)
        for name, gradient in grads(ddp).items():
            assert torch.equal(gradient, expected[name]), name

    pool.run(run, ranks=2, **LIMIT)


def test_gradients_of_gradients_and_outputs_that_cannot_be_seen(pool: WorkerPool) -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Hides(Net):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x))

    def hidden(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x).tensor).backward()

    def penalty(model: nn.Module, x: Tensor, _index: int) -> None:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
        (loss_of(output) + slope.float().square().sum(1).mean()).backward()

    def run(rank: int, world: int) -> None:
        for views in (False, True):
            follow_float32(rank, world, hidden, Hides, gradient_as_bucket_view=views)
            ddp = DDP(seeded(), mixed_precision=bf16(), gradient_as_bucket_view=views)
            for step in range(2):
                ddp.zero_grad()
                expected = low_gradients(weights_of(ddp), bf16(), step, world, penalty)
                penalty(ddp, batch(step, rank), step)
                assert_full(ddp)
                for name, gradient in grads(ddp).items():
                    assert torch.equal(gradient, expected[name]), name
        ddp = DDP(seeded(), mixed_precision=bf16())
        torch.autograd.grad(loss_of(ddp(batch(0, rank))), list(ddp.parameters()))
        assert_full(ddp)

    pool.run(run, ranks=2, **LIMIT)


def test_a_scaled_loss_and_clipping_find_full_gradients(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(), mixed_precision=MixedPrecision(torch.float16, torch.float32))
        optimizer = sgd(ddp.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        single = Net()
        for step in range(3):
            single.load_state_dict(weights_of(ddp))
            single.zero_grad()
            loss_of(single(torch.cat([batch(step, r) for r in range(world)]))).backward()
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp(batch(step, rank)))).backward()
            scaler.unscale_(optimizer)
            assert_close(grads(ddp), grads(single), 6e-3, f"step {step}")
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert_equal_on_all_ranks(ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_the_low_copies_are_freed_with_the_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(), mixed_precision=bf16())
        output = ddp(batch(0, rank))
        low = weakref.ref(ddp.module.scale._mp_param)
        assert low().dtype == torch.bfloat16
        loss_of(output).backward()
        gc.disable()  # without cycles for it to find
        try:
            del output
            assert low() is None
        finally:
            gc.enable()

    pool.run(run, ranks=2, **LIMIT)
