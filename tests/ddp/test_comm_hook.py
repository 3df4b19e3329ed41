"""Communication hooks: the buckets that they are given, and the steps that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hook_parts import LIMIT, OPTIONS, SMALL, average, done
from oracles import Net, loss_of, seeded
from oracles import batch as net_batch
from replicas import (
    CLASSES,
    Branches,
    OurDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    gradients,
    quiet,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradsync.testing import WorkerPool


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
