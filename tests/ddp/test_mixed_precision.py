"""Mixed precision: low in forward and backward, full for whoever looks from outside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from low_precision import (
    LIMIT,
    LOW,
    Net,
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
from oracles import FEATURES, batch, loss_of, sgd
from replicas import assert_equal_on_all_ranks, caught
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from gradsync import ArgumentError, MixedPrecision, PeerStepError
from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("low", LOW, ids=str)
def test_gradients_are_those_of_the_low_dtype_averaged_in_the_reduce_dtype(
    pool: WorkerPool, low: torch.dtype
) -> None:
    def run(rank: int, world: int) -> None:
        kinds = itertools.product((None, low), (None, low, torch.float32), (None, low))
        for (param, reduce, buffer), views in itertools.product(kinds, (False, True)):
            config = MixedPrecision(param, reduce, buffer)
            ddp = DDP(
                seeded(),
                mixed_precision=config,
                gradient_as_bucket_view=views,
                bucket_cap_mb=0.0002,
            )
            assert ddp.module.offset.dtype == (buffer or torch.float32)
            assert ddp.module.calls.dtype == torch.int64
            optimizer = sgd(ddp.parameters())
            for step in range(3):
                expected = low_gradients(weights_of(ddp), config, step, world)
                optimizer.zero_grad(set_to_none=step == 2)
                output = ddp(batch(step, rank))
                assert output.dtype == (param or torch.float32)
                loss_of(output).backward()
                assert_full(ddp)
                for name, gradient in grads(ddp).items():
                    where = f"{config}, views {views}, step {step}: {name}"
                    assert torch.equal(gradient, expected[name]), where
                optimizer.step()
            assert ddp.stats().buckets > 1
            assert_equal_on_all_ranks(ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_the_gradients_travel_in_the_reduce_dtype(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for config, expected in (
            (bf16(), torch.bfloat16),
            (bf16(reduce_dtype=torch.float32), torch.float32),
            (bf16(reduce_dtype=torch.float16), torch.float16),
            (MixedPrecision(reduce_dtype=torch.bfloat16), torch.bfloat16),
        ):
            ddp = DDP(seeded(), mixed_precision=config, forward_sync_buffers=False)
            plain(ddp, batch(0, rank), 0)
            with count_collectives() as counted:
                plain(ddp, batch(1, rank), 1)
            dtypes = {each.dtype for each in counted.log if each.dtype != torch.int64}
            assert dtypes == {expected}, f"{config}: {counted.log}"
            size = sum(p.numel() for p in ddp.parameters()) * expected.itemsize
            assert ddp.stats().bytes == size

    pool.run(run, ranks=2, **LIMIT)


def test_three_ranks_train_in_step_with_float32(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for dtype in LOW:
            follow_float32(rank, world, plain, dtype=dtype, steps=5)

    pool.run(run, ranks=3, **LIMIT)


def test_inputs_are_cast_wherever_they_are_and_integers_are_not(pool: WorkerPool) -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor, more: dict[str, Any], *, scale: Tensor) -> Tensor:
            self.seen = [x.dtype, more["floats"][0].dtype, more["ids"].dtype, scale.dtype]
            return super().forward(x) * scale

    def run(rank: int, world: int) -> None:
        for dtype in LOW:
            ddp = DDP(Reads(2, 2), mixed_precision=MixedPrecision(dtype))
            more = {"floats": [torch.ones(1)], "ids": torch.ones(1, dtype=torch.int64)}
            x = torch.ones(1, 2, requires_grad=True)
            ddp(x, more, scale=torch.ones(1, dtype=torch.float64)).sum().backward()
            assert ddp.module.seen == [dtype, dtype, torch.int64, dtype]
            assert x.grad is not None
            assert x.grad.dtype == torch.float32

    pool.run(run, ranks=1, **LIMIT)


def test_batch_norm_keeps_its_buffers_in_their_dtype_and_all_ranks_agree(pool: WorkerPool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    def run(rank: int, world: int) -> None:
        for low in LOW:
            config = MixedPrecision(low, torch.float32, low)
            ddp = DDP(seeded(Normed), mixed_precision=config)
            for step in range(3):
                ddp.zero_grad()
                plain(ddp, batch(step, rank), step)
            assert ddp.module.norm.running_mean.dtype == low
            assert ddp.module.norm.num_batches_tracked.item() == 3
            assert ddp.module.norm.running_mean.float().abs().sum() > 0
            assert_full(ddp)
            ddp(batch(9, rank))  # takes over the buffers of rank 0 before
            before = ddp.module.norm.running_mean.clone()
            ddp.eval()
            with torch.no_grad():
                ddp(batch(9, 0))
            assert_equal_on_all_ranks([ddp.module.norm.running_mean])
            assert rank == 0 or not torch.equal(ddp.module.norm.running_mean, before)
            state = ddp.state_dict()
            assert state["module.norm.running_mean"].dtype == torch.float32
            assert state["module.norm.num_batches_tracked"].dtype == torch.int64
        # Torch's own layer has no kernel for the mixture: that is its word, not a wrong result.
        ddp = DDP(seeded(Normed), mixed_precision=bf16())
        assert "expected scalar type" in str(caught(lambda: ddp(batch(0, rank)), RuntimeError))
        assert_full(ddp)

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ failures


def test_a_forward_that_raises_leaves_full_parameters_and_training_goes_on(
    pool: WorkerPool,
) -> None:
    class Fails(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if self.fails:
                raise ZeroDivisionError
            return output

    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Fails), mixed_precision=bf16(reduce_dtype=torch.float32))
        for step in range(3):
            ddp.zero_grad()
            pending = loss_of(ddp(batch(step, rank)))
            ddp.module.fails = True
            caught(lambda step=step: ddp(batch(step + 7, rank)), ZeroDivisionError)
            ddp.module.fails = False
            if step == 2:
                pending = pending + loss_of(ddp(batch(step, rank)))
            expected = low_gradients(
                weights_of(ddp),
                bf16(reduce_dtype=torch.float32),
                step,
                world,
            )
            pending.backward()
            assert_full(ddp)
            twice = 2 if step == 2 else 1
            assert_close(
                grads(ddp), {n: g * twice for n, g in expected.items()}, 2e-2, f"step {step}"
            )
        ddp.module.fails = True
        caught(lambda: ddp(batch(0, rank)), ZeroDivisionError)
        assert_full(ddp)

    pool.run(run, ranks=2, **LIMIT)


class Bad(torch.autograd.Function):
    """Its backward raises if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ZeroDivisionError
        return gradient, None


def test_a_backward_that_raises_leaves_full_parameters_and_training_goes_on(
    pool: WorkerPool,
) -> None:
    class Middle(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.conv(Bad.apply(self.norm(x), self.fails)[:, None]))
            return self.last((x * self.scale).flatten(1))

    def run(rank: int, world: int) -> None:
        for views in (False, True):
            ddp = DDP(
                seeded(Middle),
                mixed_precision=bf16(reduce_dtype=torch.float32),
                gradient_as_bucket_view=views,
            )
            for step in range(4):
                ddp.zero_grad()
                ddp.module.fails = rank == 1 and step in (0, 2)
                loss = loss_of(ddp(batch(step, rank)))
                if step in (0, 2):
                    caught(loss.backward, ZeroDivisionError if rank == 1 else PeerStepError)
                    assert_full(ddp)
                    continue
                loss.backward()
                assert_full(ddp)
                assert len(grads(ddp)) == 7
                assert_equal_on_all_ranks(grads(ddp).values())
            with ddp.no_sync():
                ddp.module.fails = True
                caught(loss_of(ddp(batch(9, rank))).backward, ZeroDivisionError)
            assert_full(ddp)

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ configuration


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(ArgumentError) as error:
        yield
    for word in ("mixed_precision", *words):
        assert word in str(error.value), f"{word!r} is not in {error.value}"


def test_a_config_that_cannot_be_is_refused_by_name(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        def wrap(config: object, **more: Any) -> None:
            DDP(nn.Linear(2, 2), mixed_precision=config, **more)

        for config in (True, "bf16", torch.bfloat16, object(), {"param_dtype": torch.bfloat16}):
            with refused("param_dtype", "MixedPrecision"):
                wrap(config)
        with refused("param_dtype", "torch.int32"):
            wrap(MixedPrecision(torch.int32))
        with refused("reduce_dtype", "bf16"):
            wrap(MixedPrecision(torch.bfloat16, reduce_dtype="bf16"))
        with refused("buffer_dtype", "torch.complex64"):
            wrap(MixedPrecision(buffer_dtype=torch.complex64))
        with pytest.raises(TypeError):
            MixedPrecision(dtype=torch.bfloat16)
        module = nn.Linear(2, 2)
        with refused("delay_all_reduce_named_params"):
            DDP(
                module,
                mixed_precision=MixedPrecision(torch.bfloat16),
                delay_all_reduce_named_params=[("weight", module.weight)],
                param_to_hook_all_reduce=module.bias,
            )

    pool.run(run, ranks=1, **LIMIT)


def test_ranks_with_different_configs_are_told(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> str:
        config = bf16(reduce_dtype=(torch.float32, torch.bfloat16)[rank])
        return str(caught(lambda: DDP(nn.Linear(2, 2), mixed_precision=config)))

    for message in pool.run(run, ranks=2, **LIMIT):
        assert "mixed_precision" in message


def test_torchs_config_is_accepted(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        low = torch.float16
        ddp = DDP(seeded(), mixed_precision=_MixedPrecision(low, torch.float32, low))
        expected = low_gradients(weights_of(ddp), MixedPrecision(low, torch.float32, low), 0, world)
        plain(ddp, batch(0, rank), 0)
        for name, gradient in grads(ddp).items():
            assert torch.equal(gradient, expected[name]), name

    pool.run(run, ranks=2, **LIMIT)
