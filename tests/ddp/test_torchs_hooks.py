"""Torch's own hooks and fused optimizers give with our class what they give with torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hook_parts import LIMIT, OPTIONS, SMALL, power_sgd
from oracles import History, Net, loss_of, seeded
from oracles import batch as net_batch
from oracles import train as train_net
from replicas import (
    CLASSES,
    OurDDP,
    TorchDDP,
    assert_equal_on_all_ranks,
    assert_same,
    caught,
    quiet,
    weights,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from gradsync import ArgumentError
from gradsync.testing import WorkerPool


def batched_power_sgd(**options: Any) -> tuple[Any, Any]:
    """As published, the hook refuses its own matrices, in torch's class too: it has lost the
    dimension that ``_orthogonalize`` has got since."""
    orthogonalize = powerSGD_hook._orthogonalize

    def of_two_dimensions(matrices: Tensor, epsilon: float = 0) -> None:
        orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    def batched(state, bucket):
        with mock.patch.object(powerSGD_hook, "_orthogonalize", of_two_dimensions):
            future = powerSGD_hook.batched_powerSGD_hook(state, bucket)
            future.wait()
        return future

    return power_sgd(batched, **options)


def quantization(hook: Callable[..., Any]) -> tuple[Any, Any]:
    """As published, the hooks expect what NCCL's all-gather leaves in its future: one tensor."""
    gather = dist.all_gather

    class Stacked:
        def __init__(self, work: Any) -> None:
            self._work = work

        def get_future(self) -> Any:
            return self._work.get_future().then(lambda future: [torch.stack(future.value())])

    def all_gather(*arguments: Any, **options: Any) -> Any:
        return Stacked(gather(*arguments, **options))

    def quantized(state, bucket):
        with mock.patch.object(dist, "all_gather", all_gather):
            future = hook(state, bucket)
            future.wait()
        return future

    return dist.group.WORLD, quantized


def local_sgd(*, reduces: bool) -> tuple[Any, Any]:
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 2, reduces)
    return state, post_localSGD_hook.post_localSGD_hook


# Each makes a state and a hook; both classes get a state of their own.
HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "allreduce on a given group": lambda: (dist.group.WORLD, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "fp16 around allreduce": lambda: (
        None,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "PowerSGD": lambda: power_sgd(powerSGD_hook.powerSGD_hook),
    "PowerSGD later": lambda: power_sgd(
        powerSGD_hook.powerSGD_hook, start_powerSGD_iter=3, matrix_approximation_rank=2
    ),
    "PowerSGD without memory": lambda: power_sgd(
        powerSGD_hook.powerSGD_hook, use_error_feedback=False, warm_start=False
    ),
    "PowerSGD in batches of shapes": lambda: power_sgd(
        powerSGD_hook.powerSGD_hook, batch_tensors_with_same_shape=True
    ),
    "batched PowerSGD": batched_power_sgd,
    "fp16 around PowerSGD": lambda: (
        power_sgd(powerSGD_hook.powerSGD_hook)[0],
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "quantization by tensor": lambda: quantization(quantization_hooks.quantization_pertensor_hook),
    "quantization by channel": lambda: quantization(
        quantization_hooks.quantization_perchannel_hook
    ),
    "post-local SGD": lambda: local_sgd(reduces=True),
    "post-local SGD without reduction": lambda: local_sgd(reduces=False),
    "noop": lambda: (None, debugging_hooks.noop_hook),
}


def train_with(
    cls: type[nn.Module],
    make_hook: Callable[[], tuple[Any, Any]],
    rank: int,
    *,
    model: Callable[[], nn.Module] = Net,
    steps: int = 5,
    **options: Any,
) -> History:
    ddp = cls(seeded(model), **options)
    ddp.register_comm_hook(*make_hook())
    return train_net(ddp, lambda step: net_batch(step, rank), steps=steps)


def in_turn(make_hook: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """For torch's class: a hook that issues collectives from callbacks, made safe for gloo.

    Else those of two buckets come in an order that depends on time, and the ranks read each
    other's wrong messages.
    """
    state, hook = make_hook()

    def waits(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return state, waits


class TestTorchsHooks:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_each_gives_the_gradients_that_it_gives_torchs_class(
        self, pool: WorkerPool, options: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            for name, make_hook in HOOKS.items():
                if options == "static" and name.startswith("quantization"):
                    continue  # torch makes its buckets a step later then, and a scale is a bucket's
                with quiet():
                    theirs = train_with(
                        TorchDDP, partial(in_turn, make_hook), rank, **OPTIONS[options]
                    )
                    ours = train_with(OurDDP, make_hook, rank, **OPTIONS[options])
                ours.assert_equal(theirs, bitwise=True, what=f"torch's DDP with {name}")

        pool.run(run, timeout=30, group_timeout=10)

    def test_they_do_so_on_three_ranks(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for name, make_hook in HOOKS.items():
                with quiet():
                    theirs = train_with(TorchDDP, partial(in_turn, make_hook), rank, **SMALL)
                    ours = train_with(OurDDP, make_hook, rank, **SMALL)
                ours.assert_equal(theirs, bitwise=False, what=f"torch's DDP with {name}")

        pool.run(run, ranks=3, timeout=30, group_timeout=10)

    def test_bf16_rounds_each_gradient_once_and_averages(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:  # torch's class takes the hook only with NCCL
            for options in OPTIONS.values():
                for hook in (
                    default_hooks.bf16_compress_hook,
                    default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
                ):
                    with quiet():
                        ddp = OurDDP(seeded(Net), **options)
                    ddp.register_comm_hook(None, hook)
                    loss_of(ddp(net_batch(0, rank))).backward()
                    rounded = []
                    for r in range(world):
                        alone = seeded(Net)
                        loss_of(alone(net_batch(0, r))).backward()
                        rounded.append([p.grad.bfloat16() / world for p in alone.parameters()])
                    for parameter, *parts in zip(ddp.parameters(), *rounded, strict=True):
                        assert parameter.grad.dtype == torch.float32
                        assert torch.equal(parameter.grad, sum(parts).float())

        pool.run(run, timeout=LIMIT)

    def test_builtin_hooks_are_torchs(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            kinds = dist.BuiltinCommHookType
            for kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS):
                for options in OPTIONS.values():
                    histories = []
                    for cls in CLASSES:
                        with quiet():
                            ddp = cls(seeded(Net), **options)
                        ddp._register_builtin_comm_hook(kind)
                        histories.append(train_net(ddp, lambda step: net_batch(step, rank)))
                    histories[1].assert_equal(histories[0], bitwise=True, what=f"torch's {kind}")
            error = caught(lambda: ddp._register_builtin_comm_hook(kinds.ALLREDUCE))
            assert "can only be called once" in str(error)
            fresh = OurDDP(Net())
            caught(lambda: fresh._register_builtin_comm_hook("allreduce"), ArgumentError)

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_zero_steps_inside_the_backward_as_in_torchs_class(
        self, pool: WorkerPool, ranks: int
    ) -> None:
        def run(rank: int, world: int) -> None:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            def all_reduce_and_wait(state, bucket):
                # On gloo, broadcasts from callbacks must not mix with the next bucket's sum.
                future = default_hooks.allreduce_hook(state, bucket)
                future.wait()
                return future

            for wrap in (
                ddp_zero_hook.hook_with_zero_step,
                ddp_zero_hook.hook_with_zero_step_interleaved,
            ):
                for options, shard in (({}, False), (SMALL, False), (SMALL, True)):
                    ended = []
                    for cls in CLASSES:
                        ddp = cls(seeded(partial(Net, 32)), **options)
                        with quiet():
                            zero = ZeroRedundancyOptimizer(
                                ddp.parameters(),
                                optimizer_class=torch.optim.SGD,
                                lr=0.1,
                                momentum=0.9,
                                overlap_with_ddp=True,
                            )
                        with mock.patch.object(dist, "get_backend", return_value="not gloo"):
                            hook = wrap(all_reduce_and_wait, ddp, zero, shard_buckets=shard)
                        ddp.register_comm_hook(None, hook)
                        start = weights(ddp)
                        for step in range(6):
                            ddp.zero_grad()
                            loss_of(ddp(net_batch(step, rank))).backward()
                            zero.step()
                        ended.append(weights(ddp))
                        moved = [not torch.equal(start[name], ended[-1][name]) for name in start]
                        assert all(moved)
                    if world == 2:
                        assert_same(*ended, hint=(wrap.__name__, options, shard))
                    for name in ended[0]:
                        torch.testing.assert_close(ended[1][name], ended[0][name])
                    assert_equal_on_all_ranks(ended[1].values())

        pool.run(run, ranks=ranks, timeout=LIMIT)

    def test_fused_optimizers_step_in_the_backward_as_the_plain_loop_does(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            cases = {
                torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
                torch.optim.Adam: {"lr": 0.01},
                torch.optim.AdamW: {"lr": 0.01, "weight_decay": 0.1},
            }
            for kind, arguments in cases.items():
                for options in ({}, SMALL, {"gradient_as_bucket_view": True}):
                    ended = []
                    for cls in CLASSES:
                        ddp = cls(seeded(Net), **options)
                        ddp._register_fused_optim(kind, **arguments)
                        for step in range(4):
                            ddp.zero_grad()
                            loss_of(ddp(net_batch(step, rank))).backward()
                        ended.append(weights(ddp))
                    assert_same(*ended, hint=(kind, options))
                    plain = OurDDP(seeded(Net), **options)
                    train_net(
                        plain,
                        lambda step: net_batch(step, rank),
                        steps=4,
                        optimizer=partial(kind, **arguments),
                    )
                    for name, value in weights(plain).items():
                        torch.testing.assert_close(ended[1][name], value)

        pool.run(run, timeout=LIMIT)

    def test_a_fused_optimizer_may_leave_parameters_to_another(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ended = []
            for cls in CLASSES:
                ddp = cls(seeded(Net))
                first = list(ddp.module.first.parameters())
                rest = [p for p in ddp.parameters() if not any(p is each for each in first)]
                ddp._register_fused_optim(torch.optim.SGD, 0.1, optim_params=first)
                optimizer = torch.optim.SGD(rest, lr=0.01)
                for step in range(3):
                    ddp.zero_grad()
                    loss_of(ddp(net_batch(step, rank))).backward()
                    optimizer.step()
                ended.append(weights(ddp))
            assert_same(*ended)

        pool.run(run, timeout=LIMIT)
