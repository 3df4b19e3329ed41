"""Communication hooks: torch's published ones run unmodified, and hooks that go wrong say so."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracles import History, Net, loss_of, seeded
from oracles import batch as net_batch
from oracles import train as train_net
from replicas import (
    CLASSES,
    Branches,
    OurDDP,
    TorchDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    caught,
    gradients,
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

from gradsync import (
    ArgumentError,
    CollectiveError,
    GradsyncError,
    PeerStepError,
    StateError,
    UnusedParametersError,
)
from gradsync.testing import WorkerPool

LIMIT = 60.0
SMALL = {"bucket_cap_mb": 1e-4}  # about a bucket for each layer
Future = torch.futures.Future


def done(value: object) -> Future[Any]:
    future: Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def power_sgd(hook: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    start = options.pop("start_powerSGD_iter", 2)
    state = powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=start, min_compression_rate=1, **options
    )
    return state, hook


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
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": SMALL,
    "views": {"gradient_as_bucket_view": True, **SMALL},
    "static": {"static_graph": True, **SMALL},
    "unused": {"find_unused_parameters": True, **SMALL},
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


def average(module: nn.Module, world: int, step: int = 0) -> list[Tensor]:
    """The mean of all ranks' gradients of a Net, computed here alone."""
    module.zero_grad()
    for rank in range(world):
        (loss_of(module(net_batch(step, rank))) / world).backward()
    return [parameter.grad for parameter in module.parameters()]


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


class Large(nn.Module):
    """A gradient of 1.4 MiB that is reduced where it is, small ones, and another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(3, 600)
        self.square = nn.Linear(600, 600)
        self.last = nn.Linear(600, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        return self.last(torch.tanh(self.square(torch.tanh(self.wide(x)))).double())


def images(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, 2, 5, 5, generator=generator)


def own_gradients(rank: int, step: int = 0) -> dict[str, Tensor]:
    module = Large()
    module(images(rank, step)).square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "solo": {"bucket_cap_mb": 0.5},
    "solo views": {"bucket_cap_mb": 0.5, "gradient_as_bucket_view": True},
    "solo static": {"bucket_cap_mb": 0.5, "static_graph": True},
    "unused": {"bucket_cap_mb": 0.5, "find_unused_parameters": True},
}


class TestBucket:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_hook_sees_each_gradient_once_undivided_in_the_shape_of_its_parameter(
        self, pool: WorkerPool, shape: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Large(), **SHAPES[shape])
            names = {parameter: name for name, parameter in ddp.module.named_parameters()}
            seen: list[tuple[int, bool, list[str]]] = []
            expected: dict[str, Tensor] = {}

            def hook(state: object, bucket: dist.GradBucket) -> Any:
                assert state == "state"
                buffer, parameters, grads = bucket.buffer(), bucket.parameters(), bucket.gradients()
                assert buffer.dim() == 1
                assert sum(parameter.numel() for parameter in parameters) == buffer.numel()
                assert len(parameters) == len(grads)
                seen.append((bucket.index(), bucket.is_last(), [names[p] for p in parameters]))
                for parameter, grad in zip(parameters, grads, strict=True):
                    assert type(parameter) is nn.Parameter
                    assert grad.dtype == buffer.dtype == parameter.dtype
                    assert grad.shape == parameter.shape
                    assert grad.stride() == parameter.stride()
                    assert grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                    assert torch.equal(grad, expected[names[parameter]])
                    grad.mul_(3)  # through to the buffer
                return done(buffer)

            ddp.register_comm_hook("state", hook)
            for step in range(4):
                expected = own_gradients(rank, step)
                seen.clear()
                ddp.zero_grad()
                ddp(images(rank, step)).square().mean().backward()
                assert [index for index, _, _ in seen] == list(range(len(seen)))
                assert len(seen) > 1
                assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
                assert sorted(n for _, _, each in seen for n in each) == sorted(names.values())
                for name, parameter in ddp.module.named_parameters():
                    assert torch.equal(parameter.grad, 3 * expected[name]), name
                    assert parameter.grad.stride() == parameter.stride()
            if "solo" in shape:
                assert ["square.weight"] in [each for _, _, each in seen]

        pool.run(run, timeout=LIMIT)

    def test_whatever_the_future_holds_becomes_the_gradients(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def two_steps(bucket: Any) -> Any:
                future: Any = torch.futures.Future()
                chain = future.then(lambda f: f.value() * 2).then(lambda f: f.value() * 3)
                future.set_result(bucket.buffer())
                return chain.then(lambda f: f.value() / 3)

            def another_dtype(bucket: Any) -> Any:
                bucket.set_buffer(bucket.buffer().half())
                assert bucket.buffer().dtype == torch.float16
                for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    assert grad.dtype == torch.float16
                    assert grad.shape == parameter.shape
                    assert grad.stride() == parameter.stride()
                return done(bucket.buffer().mul_(2))

            def sum_and_double(bucket: Any) -> Any:
                future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
                return future.then(lambda f: [f.value()[0].mul_(2 / dist.get_world_size())])

            twice: dict[str, Callable[[Any], Any]] = {
                "in place": lambda bucket: done(bucket.buffer().mul_(2)),
                "another tensor": lambda bucket: done(bucket.buffer() * 2),
                "a view": lambda bucket: done(bucket.buffer().mul_(2).view(1, -1)),
                "a list": lambda bucket: done([bucket.buffer() * 2]),
                "a tuple": lambda bucket: done((bucket.buffer() * 2,)),
                "every second element": lambda bucket: done(
                    torch.stack([bucket.buffer() * 2] * 2, 1)[:, 1]
                ),
                "double": lambda bucket: done(bucket.buffer().double() * 2),
                "a chain": two_steps,
                "half": another_dtype,
                "the average": sum_and_double,
            }
            everywhere = [own_gradients(r) for r in range(world)]
            mine = everywhere[rank]
            mean = {n: sum(each[n] for each in everywhere) / world for n in mine}
            for name, action in twice.items():
                for shape, options in SHAPES.items():
                    ddp = OurDDP(Large(), **options)
                    ddp.register_comm_hook(None, lambda _, bucket, a=action: a(bucket))
                    for _ in range(3):
                        ddp.zero_grad()
                        ddp(images(rank)).square().mean().backward()
                        for key, parameter in ddp.module.named_parameters():
                            expected = 2 * (mean if name == "the average" else mine)[key]
                            if name == "half":
                                expected = expected.half().to(parameter.dtype)
                            assert parameter.grad.dtype == parameter.dtype
                            torch.testing.assert_close(
                                parameter.grad, expected, msg=f"{name}, {shape}, {key}"
                            )

        pool.run(run, timeout=LIMIT)

    def test_a_future_may_be_fulfilled_when_a_later_bucket_comes(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            waiting: list[tuple[Any, Tensor]] = []

            def hook(_, bucket):
                future: Any = torch.futures.Future()
                waiting.append((future, bucket.buffer()))
                if bucket.is_last():  # all in one collective
                    joined = torch.cat([buffer for _, buffer in waiting]) / world
                    dist.all_reduce(joined)
                    for each, buffer in waiting:
                        part, joined = joined[: buffer.numel()], joined[buffer.numel() :]
                        each.set_result(part)
                    waiting.clear()
                return future

            for options in OPTIONS.values():
                with quiet():
                    ddp = OurDDP(seeded(Net), **options)
                ddp.register_comm_hook(None, hook)
                for step in range(3):
                    ddp.zero_grad()
                    loss_of(ddp(net_batch(step, rank))).backward()
                    expected = average(seeded(Net), world, step)
                    for parameter, mean in zip(ddp.parameters(), expected, strict=True):
                        torch.testing.assert_close(parameter.grad, mean)

        pool.run(run, timeout=LIMIT, group_timeout=10)


class TestSteps:
    def test_a_hook_runs_for_reduced_backwards_only_and_sees_what_no_sync_gathered(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for options in ({}, SMALL, {"gradient_as_bucket_view": True}):
                grads = []
                for cls in CLASSES:
                    ddp = cls(seeded(Net), **options)
                    calls: list[int] = []

                    def hook(state, bucket, calls=calls):
                        calls.append(bucket.index())
                        return default_hooks.allreduce_hook(None, bucket)

                    ddp.register_comm_hook(None, hook)
                    for step in range(3):
                        ddp.zero_grad()
                        with ddp.no_sync():
                            loss_of(ddp(net_batch(step, rank))).backward()
                            loss_of(ddp(net_batch(step + 10, rank))).backward()
                        calls.clear()
                        with ddp.no_sync():
                            loss_of(ddp(net_batch(step + 20, rank))).backward()
                        assert not calls
                        loss_of(ddp(net_batch(step + 30, rank))).backward()
                        assert calls
                    grads.append(gradients(ddp.module))
                assert_same(*grads, hint=options)

        pool.run(run, timeout=LIMIT)

    def test_unused_on_one_rank_gets_what_the_hook_makes_of_the_others(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for views in (False, True):
                for static in (False, True):
                    models = []
                    for cls in CLASSES:
                        with quiet():
                            ddp = cls(
                                Branches(3),
                                find_unused_parameters=True,
                                gradient_as_bucket_view=views,
                                static_graph=static,
                                **SMALL,
                            )
                        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
                        models.append(ddp)
                    for step in range(4):
                        # Branch 0 on rank 0 alone, branch 1 on the others, branch 2 nowhere.
                        use = 1 if rank else 0
                        if step % 2 and not static:
                            use = 1 - use
                        for ddp in models:
                            ddp.zero_grad()
                            ddp(batch(rank, step), use).sum().backward()
                        assert_same(*map(gradients, models), hint=(views, static, step))
                    assert models[1].module.branch[2].weight.grad is None
                    assert_equal_on_all_ranks(
                        p.grad for p in models[1].parameters() if p.grad is not None
                    )

        pool.run(run, timeout=LIMIT)

    def test_sparse_gradients_go_through_hooks_as_sparse(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            class Words(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    torch.manual_seed(7)
                    self.table = nn.Embedding(9, 3, sparse=True)
                    self.head = nn.Linear(3, 2)

                def forward(self, words: Tensor) -> Tensor:
                    return self.head(self.table(words))

            def halves(state, bucket):
                tables = [len(p) == 9 for p in bucket.parameters()]
                assert bucket.buffer().is_sparse == any(tables)
                if not isinstance(bucket, dist.GradBucket):  # torch's has none of sparse buckets
                    assert [g.is_sparse for g in bucket.gradients()] == tables
                return done(bucket.buffer() * 0.5)

            for hook in (default_hooks.allreduce_hook, halves):
                models = [cls(Words()) for cls in CLASSES]
                for ddp in models:
                    ddp.register_comm_hook(None, hook)
                for step in range(3):
                    words = torch.tensor([rank, step, 8, 8])
                    for ddp in models:
                        ddp.zero_grad()
                        ddp(words).square().sum().backward()
                    ours = models[1].module.table.weight.grad
                    assert ours.is_sparse
                    assert_same(*map(gradients, models), hint=(hook, step))

        pool.run(run, timeout=LIMIT)

    def test_one_rank_alone_calls_the_hook_too(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def hook(state, bucket):
                return done(bucket.buffer() * 5)

            for options in ({}, SMALL, {"gradient_as_bucket_view": True}, {"static_graph": True}):
                models = [cls(seeded(Net), **options) for cls in CLASSES]
                for step in range(3):
                    for ddp in models:
                        if step == 0:
                            ddp.register_comm_hook(None, hook)
                        ddp.zero_grad()
                        loss_of(ddp(net_batch(step, rank))).backward()
                    assert_same(*map(gradients, models))
                alone = seeded(Net)
                loss_of(alone(net_batch(2, rank))).backward()
                for parameter, own in zip(models[1].parameters(), alone.parameters(), strict=True):
                    assert torch.equal(parameter.grad, own.grad * 5)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_create_graph_and_a_hook_do_not_get_in_each_others_way(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(seeded(Net), **SMALL)
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            for step in range(3):
                ddp.zero_grad()
                with quiet():
                    loss_of(ddp(net_batch(step, rank))).backward(create_graph=True)
                expected = average(seeded(Net), world, step)
                for parameter, mean in zip(ddp.parameters(), expected, strict=True):
                    torch.testing.assert_close(parameter.grad.detach(), mean, atol=1e-3, rtol=1e-2)

        pool.run(run, timeout=LIMIT)


def not_a_future(bucket: Any) -> Any:
    return bucket.buffer()


def wrong_size(bucket: Any) -> Any:
    return done(bucket.buffer()[:-1].clone())


def wrong_type(bucket: Any) -> Any:
    return done("text")


def failed(bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("no luck"))
    return future


def failing_callback(bucket: Any) -> Any:
    def raises(future: Any) -> Any:
        raise ValueError("no luck in a callback")

    return done(bucket.buffer()).then(raises)


WRONG: dict[Callable[[Any], Any], tuple[type[Exception], str]] = {
    not_a_future: (StateError, "must return a torch.futures.Future object, but got Tensor"),
    wrong_size: (StateError, "elements for a bucket of"),
    wrong_type: (StateError, "holds str"),
    failed: (ValueError, "no luck"),
    failing_callback: (CollectiveError, "no luck in a callback"),
}


def full_text(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class TestFailures:
    @pytest.mark.parametrize("options", ["plain", "buckets"])
    @pytest.mark.parametrize("at_once", [True, False])
    def test_a_hook_that_sends_and_then_raises_is_told_to_the_others(
        self, pool: WorkerPool, at_once: bool, options: str
    ) -> None:
        class Raises:
            issues_at_once = at_once

            def __init__(self, rank: int) -> None:
                self.rank, self.broken = rank, False

            def __call__(self, state, bucket):
                future = default_hooks.allreduce_hook(None, bucket)
                if self.broken and self.rank == 1:
                    raise RuntimeError("sent, and then no luck")
                return future

        def run(rank: int, world: int) -> str:
            ddp = OurDDP(seeded(Net), **OPTIONS[options])
            hook = Raises(rank)
            ddp.register_comm_hook(None, hook)
            text = ""
            for step in range(4):
                hook.broken = step == 2
                ddp.zero_grad()
                backward = loss_of(ddp(net_batch(step, rank))).backward
                if hook.broken:
                    began = time.monotonic()
                    text = full_text(caught(backward))
                    assert time.monotonic() - began < 5
                else:
                    backward()
            assert_equal_on_all_ranks([p.grad for p in ddp.parameters()])
            return text

        other, culprit = pool.run(run, timeout=60, group_timeout=20)
        assert "the backward of rank 1 raised" in other
        assert "sent, and then no luck" in culprit

    @pytest.mark.parametrize("options", ["plain", "buckets", "views", "static", "unused"])
    def test_what_a_hook_does_wrong_is_told_with_rank_and_bucket_and_to_the_others_at_once(
        self, pool: WorkerPool, options: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            for wrong, (kind, text) in WRONG.items():
                for culprits in ((1,), tuple(range(world))):
                    if wrong is failing_callback and culprits == (1,):
                        continue  # nobody can tell it from a collective that failed, see below
                    broken = False

                    def hook(state, bucket, wrong=wrong, culprits=culprits):
                        future = default_hooks.allreduce_hook(None, bucket)
                        if not broken or rank not in culprits or not bucket.is_last():  # noqa: B023
                            return future
                        future.wait()
                        return wrong(bucket)

                    with quiet():
                        ddp = OurDDP(seeded(Net), **OPTIONS[options])
                    ddp.register_comm_hook(None, hook)
                    for step in range(4):
                        broken = step == 2
                        ddp.zero_grad()
                        backward = loss_of(ddp(net_batch(step, rank))).backward
                        if not broken:
                            backward()
                            continue
                        began = time.monotonic()
                        error = caught(backward)
                        assert time.monotonic() - began < 5
                        what = f"{wrong.__name__}, {culprits}: {error!r}"
                        if rank in culprits:
                            assert isinstance(error, kind), what
                            assert text in full_text(error), what
                            places = f"on rank {rank}, bucket", f"rank {rank} of {world}: step 3"
                            assert any(place in full_text(error) for place in places), what
                            assert "first.weight" in full_text(error) or "6 param" in full_text(
                                error
                            ), what
                        else:
                            assert isinstance(error, PeerStepError), what
                            assert "backward of rank 1 raised" in str(error), what
                    expected = average(seeded(Net), world, 3)
                    for parameter, mean in zip(ddp.parameters(), expected, strict=True):
                        torch.testing.assert_close(parameter.grad, mean)

        pool.run(run, timeout=LIMIT, group_timeout=15)

    @pytest.mark.parametrize("way", ["raises", "fails in a callback", "raises in a chain"])
    def test_the_other_ranks_get_an_error_in_time_if_a_hook_never_sends_its_bucket(
        self, pool: WorkerPool, way: str
    ) -> None:
        def run(rank: int, world: int) -> str:
            broken = False
            state, power = power_sgd(powerSGD_hook.powerSGD_hook)

            def hook(_, bucket):
                if broken and rank == 1 and bucket.index() == 1:
                    if way == "fails in a callback":
                        default_hooks.allreduce_hook(None, bucket)
                        return failing_callback(bucket)
                    raise ArithmeticError("not today")
                if way == "raises in a chain":
                    return power(state, bucket)
                return default_hooks.allreduce_hook(None, bucket)

            ddp = OurDDP(seeded(Net), **SMALL)
            ddp.register_comm_hook(None, hook)
            for step in range(3):
                loss_of(ddp(net_batch(step, rank))).backward()
            broken = True
            began = time.monotonic()
            error = caught(loss_of(ddp(net_batch(3, rank))).backward)
            assert time.monotonic() - began < 6
            return f"{type(error).__name__}: {full_text(error)}"

        first, second = pool.run(run, timeout=30, group_timeout=2, grace=8)
        assert "CollectiveError: rank 0 of 2: " in first
        if way == "fails in a callback":
            assert "CollectiveError: rank 1 of 2: step 4: the reduction of bucket 1" in second
            assert "no luck in a callback" in second
        else:
            assert "ArithmeticError: not today" in second
            assert "on rank 1, bucket 1: second.bias, second.weight" in second

    def test_a_hook_that_raises_once_is_tried_with_zeros_and_the_others_learn_at_once(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for options in OPTIONS.values():
                for wrap in (lambda hook: hook, default_hooks.fp16_compress_wrapper):

                    def careful(state, bucket):
                        if not bucket.buffer().isfinite().all():
                            raise ArithmeticError("a gradient is not finite")
                        return default_hooks.allreduce_hook(None, bucket)

                    with quiet():
                        ddp = OurDDP(seeded(Net), **options)
                    ddp.register_comm_hook(None, wrap(careful))
                    for step in range(6):
                        ddp.zero_grad()
                        bad = step in (0, 3)
                        x = net_batch(step, rank)
                        if bad and rank == 1:
                            x = x * torch.inf
                        backward = loss_of(ddp(x)).backward
                        if not bad:
                            backward()
                            continue
                        began = time.monotonic()
                        error = caught(backward)
                        assert time.monotonic() - began < 5
                        assert isinstance(error, ArithmeticError if rank == 1 else PeerStepError)
                    expected = average(seeded(Net), world, 5)
                    for parameter, mean in zip(ddp.parameters(), expected, strict=True):
                        torch.testing.assert_close(parameter.grad, mean, atol=1e-3, rtol=1e-2)

        pool.run(run, timeout=LIMIT, group_timeout=15)

    def test_unused_parameters_are_told_on_every_rank(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for options in ({}, SMALL, {"gradient_as_bucket_view": True}):
                ddp = OurDDP(Branches(2), **options)
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
                ddp(batch(rank), 0, 1).sum().backward()
                ddp(batch(rank), *((0,) if rank == 1 else (0, 1))).sum().backward()
                error = caught(lambda: ddp(batch(rank), 0, 1), UnusedParametersError)  # noqa: B023
                assert "for rank 1: branch.1.weight, branch.1.bias" in str(error)
                assert "for rank 0" not in str(error)
                ddp.zero_grad()
                ddp(batch(rank), 0, 1).sum().backward()
                assert_equal_on_all_ranks(p.grad for p in ddp.parameters())

        pool.run(run, ranks=3, timeout=LIMIT, group_timeout=15)


class Module(nn.Linear):
    """Small."""

    def __init__(self) -> None:
        super().__init__(3, 2)


class TestRegistration:
    def test_what_cannot_be_a_hook_is_refused_in_torchs_words(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def wrong_bucket(state, bucket: int):
                return done(bucket)

            def wrong_return(state, bucket: dist.GradBucket) -> int:
                return 1

            def almost(state, bucket: dist.GradBucket) -> torch.futures.Future[int]:
                return done(1)

            annotate(wrong_bucket, bucket=int)
            annotate(wrong_return, bucket=dist.GradBucket, **{"return": int})
            annotate(almost, bucket=dist.GradBucket, **{"return": torch.futures.Future[int]})
            for hook in (1, "allreduce", None, wrong_bucket, wrong_return, almost):
                theirs, ours = (
                    caught(lambda: cls(Module()).register_comm_hook(None, hook))  # noqa: B023
                    for cls in CLASSES
                )
                kind = TypeError if not callable(hook) else ValueError
                assert isinstance(theirs, kind)
                assert isinstance(ours, kind)
                assert isinstance(ours, GradsyncError)
                assert str(theirs).rstrip(".") in str(ours)

            def one_argument(bucket):
                return done(bucket.buffer())

            error = caught(lambda: OurDDP(Module()).register_comm_hook(None, one_argument))
            assert isinstance(error, ArgumentError)
            assert "one_argument takes 1 arguments" in str(error)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_annotations_may_be_text_and_hooks_may_be_objects_methods_and_partials(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            class Hook:
                def __call__(self, state, bucket):
                    return done(bucket.buffer() * state)

                def method(self, state, bucket):
                    return self(state, bucket)

            def text(state: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
                return done(bucket.buffer() * state)

            def more(state, bucket, factor):
                return done(bucket.buffer() * state * factor)

            def anything(*arguments):
                return done(arguments[1].buffer() * arguments[0])

            assert text.__annotations__["bucket"] == "dist.GradBucket"
            for hook in (Hook(), Hook().method, text, partial(more, factor=1), anything):
                ddp = OurDDP(Module())
                ddp.register_comm_hook(3, hook)
                ddp(torch.ones(1, 3)).sum().backward()
                assert ddp.module.bias.grad.tolist() == [3, 3]
                assert isinstance(ddp._get_ddp_logging_data()["comm_hook"], str)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_a_second_hook_is_refused_and_the_first_one_stays(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                ddp = cls(Module())
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
                for again in (
                    lambda d: d.register_comm_hook(None, debugging_hooks.noop_hook),
                    lambda d: d._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
                ):
                    error = caught(lambda: again(ddp), RuntimeError)  # noqa: B023
                    assert "can only be called once" in str(error)
                    assert "register_builtin_comm_hook" in str(error)
                ddp(torch.full((1, 3), float(rank))).sum().backward()
                assert ddp.module.weight.grad.tolist() == [[0.5] * 3] * 2

        pool.run(run, timeout=LIMIT)

    def test_a_hook_can_come_after_training_and_not_during_a_backward(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for options in OPTIONS.values():
                with quiet():
                    ddp = OurDDP(seeded(Net), **options)
                for step in range(2):
                    ddp.zero_grad()
                    loss_of(ddp(net_batch(step, rank))).backward()
                errors = []

                def late(_: Tensor, ddp=ddp, errors=errors) -> None:
                    if not errors:
                        register = partial(ddp.register_comm_hook, None, debugging_hooks.noop_hook)
                        errors.append(caught(register, StateError))

                handle = ddp.module.second.weight.register_hook(late)
                loss_of(ddp(net_batch(2, rank))).backward()
                handle.remove()
                assert "should be called before calling backward" in str(errors[0])
                ddp.register_comm_hook(None, lambda _, bucket: done(bucket.buffer() * 0 + rank))
                for step in range(3):  # with gradients that are there, and without
                    loss_of(ddp(net_batch(step, rank))).backward()
                    for parameter in ddp.parameters():
                        assert (parameter.grad == rank).all()
                    if step == 1:
                        ddp.zero_grad()

        pool.run(run, timeout=LIMIT)

    def test_a_sum_and_a_hook_exclude_each_other(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Module(), reduce="sum")
            register = partial(ddp.register_comm_hook, None, default_hooks.allreduce_hook)
            assert "exclude each other" in str(caught(register, StateError))

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_logging_data_names_the_hook_as_torch_does(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            kinds = dist.BuiltinCommHookType
            for register in (
                lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
                lambda ddp: ddp.register_comm_hook(*power_sgd(powerSGD_hook.powerSGD_hook)),
                lambda ddp: ddp._register_builtin_comm_hook(kinds.FP16_COMPRESS),
                lambda ddp: ddp._register_builtin_comm_hook(kinds.ALLREDUCE),
            ):
                named = []
                for cls in CLASSES:
                    ddp = cls(Module())
                    assert not ddp._get_ddp_logging_data().get("comm_hook")
                    register(ddp)
                    named.append(ddp._get_ddp_logging_data()["comm_hook"])
                assert named[0] == named[1]

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_a_pickled_or_copied_model_has_its_hook_again(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for state in (None, dist.group.WORLD):
                ddp = OurDDP(nn.Linear(3, 2))
                ddp.register_comm_hook(state, default_hooks.allreduce_hook)
                builtin = OurDDP(nn.Linear(3, 2))
                builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
                for each in map(roundtrip, (ddp, builtin)):
                    assert each._get_ddp_logging_data()["comm_hook"]
                    each(torch.full((1, 3), float(rank))).sum().backward()
                    assert each.module.weight.grad.tolist() == [[0.5] * 3] * 2
                copied = copy.deepcopy(ddp)
                copied(torch.full((1, 3), float(rank))).sum().backward()
                assert copied.module.weight.grad.tolist() == [[0.5] * 3] * 2
            powered = OurDDP(nn.Linear(3, 2))
            powered.register_comm_hook(*power_sgd(powerSGD_hook.powerSGD_hook))
            powered(torch.ones(1, 3)).sum().backward()
            with quiet():
                ((_, state),) = roundtrip(powered)._comm_hooks
            assert state.iter == 1

        pool.run(run, timeout=LIMIT)

    def test_a_hook_and_its_state_go_with_the_model(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            class State:
                pass

            def hook(state, bucket):
                return done(bucket.buffer())

            state = State()
            ddp = OurDDP(Module())
            ddp.register_comm_hook(state, hook)
            ddp(torch.ones(1, 3)).sum().backward()
            left = weakref.ref(state)
            del state, ddp
            gc.collect()
            assert left() is None

        pool.run(run, ranks=1, timeout=LIMIT)


def annotate(function: Any, **annotations: Any) -> None:
    """As types: in this file they would be text, which torch takes for wrong."""
    function.__annotations__ = annotations


def roundtrip(ddp: nn.Module) -> Any:
    memory = io.BytesIO()
    torch.save(ddp, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)
